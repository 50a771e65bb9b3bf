"""Sampling tokens: the same in every batch, penalties as in transformers and OpenAI's API, JSON that parses."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.platform.inference.runtime.stages import (
    VOCABULARY,
    Serving,
    model_of,
    opening,
    prompt_of,
    stages_of,
)
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from share_compute.data.tokenization import train_tokenizer
from share_compute.errors import UserError
from share_compute.inference.runtime.constraints import Grammars, check_schema
from share_compute.inference.runtime.drawing import draw, eligible
from share_compute.inference.runtime.sampling import Sampler
from share_compute.inference.scheduler.engine_steps import Chunk, SampledToken
from share_compute.inference.scheduler.options import SamplingOptions

CPU = torch.device("cpu")
PROMPT = prompt_of(9, 7)
DRAWN = {"temperature": 1.3, "top_p": 0.9, "seed": 11}


def logits_of(seed: int, size: int = VOCABULARY) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3


def drawn_at(logits: Tensor, options: SamplingOptions, position: int) -> int:
    (token,) = draw(logits[None], [options], [position])
    return token


def sampled(logits: Tensor, position: int = len(PROMPT), **options: Any) -> SampledToken:
    """Draw one token for a sequence that begins with `PROMPT`."""
    history = options.pop("history", tuple(PROMPT))
    sampler = Sampler(len(logits), CPU)
    sampler.open(opening(1, PROMPT, history=history, **options))
    (one,) = sampler.sample(logits[None], [Chunk(1, position - 1, 1, None, samples=True)])
    return one


def test_a_draw_does_not_depend_on_its_batch() -> None:
    (stage,) = stages_of("llama", [(0, 3)])
    alone = Serving([stage]).run({opening(1, PROMPT, **DRAWN): [9]}, 12)[1]
    stage.clear()
    others = {opening(n, prompt_of(4 + n, n), temperature=0.8, seed=n): [4 + n] for n in (2, 3, 4)}
    together = Serving([stage]).run({**others, opening(1, PROMPT, **DRAWN): [4, 5]}, 12)[1]
    assert together == alone
    stage.clear()
    # Another server continues after six tokens.
    history = (*PROMPT, *alone[:6])
    after = Serving([stage]).run({opening(1, PROMPT, **DRAWN, history=history): [len(history)]}, 6)[1]
    assert after == alone[6:]


def test_draws_follow_the_distribution() -> None:
    logits, options = logits_of(1, 6), SamplingOptions(seed=3, max_tokens=1, temperature=2.0)
    drawn = Counter(drawn_at(logits, options, position) for position in range(4000))
    for token, share in enumerate((logits / 2).softmax(-1).tolist()):
        assert drawn[token] / 4000 == pytest.approx(share, abs=0.03)
    seeds = {drawn_at(logits, options.model_copy(update={"seed": seed}), 7) for seed in range(-30, 30)}
    assert len(seeds) > 3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 7}, {"top_p": 0.6}, {"top_p": 0.999}, {"top_p": 1e-9}, {"min_p": 0.05}, {"top_k": 500},
        {"top_k": 20, "top_p": 0.7, "min_p": 0.02, "temperature": 0.6}, {"temperature": 1e-4},
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [VOCABULARY, 3000, 40_000])
def test_what_may_be_drawn_is_as_in_transformers(options: dict[str, Any], seed: int, size: int) -> None:
    requested = SamplingOptions(seed=1, max_tokens=1, **options)
    logits = logits_of(seed, size) / (8 if size > 1024 else 1)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(requested.temperature)])
    if requested.top_k:
        warpers.append(TopKLogitsWarper(requested.top_k))
    if requested.top_p < 1:
        warpers.append(TopPLogitsWarper(requested.top_p))
    if requested.min_p:
        warpers.append(MinPLogitsWarper(requested.min_p))
    expected = warpers(torch.zeros(1, 1, dtype=torch.int64), logits[None].clone())[0].isfinite()
    weights = ((logits - logits.max()) / requested.temperature).exp()
    ids = eligible(weights, requested)
    kept = torch.zeros(size, dtype=torch.bool)
    kept[slice(None) if ids is None else torch.from_numpy(ids)] = True
    # transformers may also keep tokens whose weight rounds to 0; these are never drawn.
    assert torch.equal(kept & (weights > 0), expected & (weights > 0))
    assert expected[drawn_at(logits, requested, 5)]


def test_penalties() -> None:
    logits = logits_of(2)
    seen = torch.tensor([[*PROMPT, 50, 50]])
    expected = RepetitionPenaltyLogitsProcessor(1.8)(seen, logits[None].clone()).argmax()
    history = (*PROMPT, 50, 50)
    assert sampled(logits, 11, history=history, repetition_penalty=1.8).token == int(expected)
    best, second = logits.topk(2).indices.tolist()
    gap = float(logits[best] - logits[second])
    # Penalties count generated tokens only, as OpenAI's do: a prompt full of the best token changes nothing.
    assert sampled(logits, history=(*PROMPT,), presence_penalty=2).token == best
    penalties = {"frequency_penalty": min(2.0, gap / 3 + 0.01)}
    assert sampled(logits, 11, history=(*PROMPT, best, best), **penalties).token == best
    assert sampled(logits, 13, history=(*PROMPT, *[best] * 4), **penalties).token == second


def test_penalties_follow_what_is_drawn() -> None:
    """Each drawn token counts for the next one, as in generate."""
    serving = Serving(stages_of("llama", [(0, 3)]))
    text = serving.run({opening(1, PROMPT, repetition_penalty=1.5): [9]}, 12)[1]
    ids = torch.tensor([PROMPT])
    made = model_of("llama").generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
        repetition_penalty=1.5,
    )
    assert text == made[0, 9:].tolist()


def test_stop_tokens_end_and_wait_for_min_tokens() -> None:
    logits = logits_of(3)
    best, second = logits.topk(2).indices.tolist()
    assert sampled(logits, stop_token_ids=(best,)).finish == "stop"
    waiting = sampled(logits, stop_token_ids=(best,), min_tokens=1)
    assert (waiting.token, waiting.finish) == (second, None)
    ended = sampled(logits, 10, history=(*PROMPT, 5), stop_token_ids=(best,), min_tokens=1)
    assert (ended.token, ended.finish) == (best, "stop")


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_a_bias_bans_a_token_or_selects_it_alone(temperature: float) -> None:
    logits = logits_of(8)
    best, second, *_, worst = logits.argsort(descending=True).tolist()
    for seed in range(50):
        rules = {"temperature": temperature, "seed": seed}
        assert sampled(logits, **rules, logit_bias=((best, -100),)).token != best
        assert sampled(logits, **rules, logit_bias=((worst, 100),)).token == worst
    gap = float(logits[best] - logits[second])
    assert sampled(logits, logit_bias=((second, gap + 0.01),)).token == second
    assert sampled(logits, logit_bias=((second, gap - 0.01),)).token == best


def test_penalties_do_not_cancel_a_bias() -> None:
    logits = logits_of(8)
    best, *_, worst = logits.argsort(descending=True).tolist()
    history = (*PROMPT, best, worst)
    penalties = {"repetition_penalty": 2.0, "frequency_penalty": 2.0, "presence_penalty": 2.0}
    assert sampled(logits, 11, history=history, **penalties, logit_bias=((worst, 100),)).token == worst
    penalties = {"repetition_penalty": 0.5, "frequency_penalty": -2.0, "presence_penalty": -2.0}
    assert sampled(logits, 11, history=history, **penalties, logit_bias=((best, -100),)).token != best


def test_a_bias_makes_no_stop_token_possible_before_min_tokens() -> None:
    logits = logits_of(3)
    rules: dict[str, Any] = {"stop_token_ids": (5,), "min_tokens": 1, "logit_bias": ((5, 100),)}
    assert sampled(logits, **rules).token == int(logits.argmax())
    assert sampled(logits, 10, history=(*PROMPT, 9), **rules).token == 5


def test_ids_without_a_logit_are_skipped() -> None:
    """A tokenizer may have more tokens than the model has logits."""
    logits = logits_of(3)
    beyond = (VOCABULARY, 2**40)
    bias = tuple((token, 100.0) for token in beyond)
    one = sampled(logits, stop_token_ids=beyond, min_tokens=4, logit_bias=bias)
    assert one.token == int(logits.argmax())


def test_logprobs_are_of_the_model_itself() -> None:
    logits = logits_of(4)
    bias = ((int(logits.argmax()), -100), (int(logits.argmin()), 3))
    rules: dict[str, Any] = {"temperature": 0.3, "top_k": 3, "repetition_penalty": 2.0, "logit_bias": bias}
    one = sampled(logits, seed=5, logprobs=4, **rules)
    exact = logits.log_softmax(-1)
    assert one.logprob == pytest.approx(float(exact[one.token]))
    assert [token for token, _ in one.top] == logits.topk(4).indices.tolist()
    assert [value for _, value in one.top] == pytest.approx(exact.topk(4).values.tolist())
    assert sampled(logits).logprob is None


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "kind": {"enum": ["cat", "dog"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [json.dumps({"name": f"n{count}", "age": count, "kind": "cat"}) for count in range(200)]
    train_tokenizer(texts, 300).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("seed", range(3))
def test_text_of_a_schema_parses(tokenizer_folder: Path, seed: int) -> None:
    from share_compute.data.tokenization import load_tokenizer

    tokenizer, size = load_tokenizer(tokenizer_folder), 320
    history: list[int] = []
    sampler = Sampler(size, CPU, tokenizer_folder)
    # The grammar forbids tokens despite their bias, and allows a banned token if no other is possible.
    bias = tuple((token, chance) for token, chance in zip(range(size), (100, -100) * 150, strict=False))
    requested: dict[str, Any] = {"json_schema": SCHEMA, "temperature": 1.0, "seed": seed, "min_tokens": 3}
    if seed:
        requested["logit_bias"] = bias
    sampler.open(opening(1, PROMPT, **requested))
    for place in range(400):
        if place == 5:  # a takeover in the middle
            sampler = Sampler(size, CPU, tokenizer_folder)
            sampler.open(opening(1, PROMPT, history=(*PROMPT, *history), **requested))
        chunk = Chunk(1, len(PROMPT) + place - 1, 1, None, samples=True)
        (one,) = sampler.sample(logits_of(1000 * seed + place, size)[None], [chunk])
        history.append(one.token)
        if one.finish == "stop":
            break
    found = json.loads(tokenizer.decode(history, skip_special_tokens=True))
    assert set(found) == {"name", "age", "kind"}
    assert found["kind"] in ("cat", "dog")
    assert 0 <= found["age"] <= 120
    # Tokens that are computed past the end are marked as finished.
    (ahead,) = sampler.sample(logits_of(1, size)[None], [chunk])
    assert ahead.finish == "stop"


@pytest.mark.parametrize("schema", ["{", "[]", '{"type": "objec"}', '{"$ref": "#/nothing"}', "[" * 100_000])
def test_schemas_that_cannot_be_followed_are_refused(schema: str) -> None:
    with pytest.raises(UserError, match="cannot be followed") as caught:
        check_schema(schema)
    assert caught.value.hint


@pytest.mark.parametrize("schema", ["", "true", SCHEMA])
def test_schemas_that_can_be_followed(schema: str) -> None:
    check_schema(schema)


GRAMMAR = '%llguidance {}\nstart: "x" TEXT\nTEXT: /[a-z ]*/'


def test_text_of_a_grammar_ends_at_a_stop_token_wherever_it_may_end(tokenizer_folder: Path) -> None:
    from share_compute.data.tokenization import load_tokenizer

    tokenizer, size = load_tokenizer(tokenizer_folder), 320
    stop = next(id_ for id_ in range(size) if tokenizer.decode([id_]) == "!")
    requested = {"grammar": GRAMMAR, "temperature": 1.0, "seed": 0, "stop_token_ids": (stop,)}
    history: list[int] = []
    for place in range(400):
        sampler = Sampler(size, CPU, tokenizer_folder)  # a takeover before each token
        sampler.open(opening(1, PROMPT, history=(*PROMPT, *history), **requested))
        chunk = Chunk(1, len(PROMPT) + place - 1, 1, None, samples=True)
        (one,) = sampler.sample(logits_of(place, size)[None], [chunk])
        if one.finish == "stop":
            break
        history.append(one.token)
    assert one.token in (stop, tokenizer.eos_token_id)
    assert re.fullmatch("x[a-z ]*", tokenizer.decode(history))


def test_a_grammar_cannot_be_combined_with_a_schema_and_must_be_valid(tokenizer_folder: Path) -> None:
    with pytest.raises(ValidationError, match="exclude each other"):
        opening(1, PROMPT, grammar=GRAMMAR, json_schema="")
    with pytest.raises(UserError, match="grammar cannot be followed"):
        Sampler(320, CPU, tokenizer_folder).open(opening(1, PROMPT, grammar="start: NOTHING"))


def test_constrained_text_needs_a_tokenizer(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        with pytest.raises(UserError, match="tokenizer") as refused:
            Sampler(VOCABULARY, CPU, folder).open(opening(7, PROMPT, json_schema=""))
        assert refused.value.details["sequence"] == 7, "the others in its step go on"
    with pytest.raises(UserError, match="tokenizer"):
        Grammars(tmp_path, VOCABULARY).start("")
    Sampler(VOCABULARY, CPU, tmp_path).warm_up()  # a request for constrained text is refused
