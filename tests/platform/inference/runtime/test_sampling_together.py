"""Sequences sampled in one step get the tokens that each gets alone, and those of the earlier sequential sampler."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.platform.inference.runtime.sequential_sampling import sampled_alone
from tests.platform.inference.runtime.stages import opening
from torch import Tensor

from share_compute.inference.runtime.drawing import eligible
from share_compute.inference.runtime.sampling import Sampler
from share_compute.inference.scheduler.engine_steps import Chunk, Opening, SampledToken
from share_compute.inference.scheduler.options import SamplingOptions

pytestmark = pytest.mark.exact
CPU = torch.device("cpu")
CASES = 40
"""Number of drawn sequences for each size of the vocabulary."""
PER_STEP = 8


def drawn_options(chance: random.Random, size: int) -> dict[str, Any]:
    """Return random sampling options; each is neutral in about half of the cases."""

    def maybe(neutral: Any, *others: Any) -> Any:
        return chance.choice([neutral] * len(others) + list(others))

    biased = chance.sample(range(size), min(size, maybe(0, 1, 50)))
    return {
        "seed": chance.randrange(-(2**63), 2**63),
        "temperature": chance.choice([0, 0.01, 0.3, 0.7, 1.0, 1.3, 2.0]),
        "top_p": maybe(1.0, 1e-9, 0.3, 0.9, 0.99, 0.9999),
        "top_k": maybe(0, 1, 7, 40, 2000),
        "min_p": maybe(0.0, 0.001, 0.05, 1.0),
        "repetition_penalty": maybe(1.0, 0.7, 1.1, 1.9),
        "frequency_penalty": maybe(0.0, -1.1, 0.3, 2.0),
        "presence_penalty": maybe(0.0, -0.7, 1.3),
        "logit_bias": tuple((token, round(chance.uniform(-100, 100), 2)) for token in biased),
        "stop_token_ids": tuple(chance.sample(range(size), maybe(0, 2, 20))),
        "min_tokens": maybe(0, 3, 12),
        "logprobs": maybe(None, 0, 5, 20),
    }


def drawn_openings(chance: random.Random, size: int) -> list[Opening]:
    openings = []
    for number in range(CASES):
        prompt = [chance.randrange(size) for _ in range(chance.randint(1, 30))]
        # Few different tokens, so that penalties meet tokens that were generated several times.
        generated = [chance.randrange(min(size, 25)) for _ in range(chance.randint(0, 12))]
        history = (*prompt, *generated)
        openings.append(opening(number, prompt, history=history, **drawn_options(chance, size)))
    return openings


def logits_for(size: int, seed: int) -> Tensor:
    """Return logits ``[CASES, size]``: flat ones, spread ones, and ones like those of a language model."""
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(CASES, size, generator=source)
    logits[1::3] *= 4
    logits[2::3] += torch.randn(CASES, size, generator=source)[2::3].clamp_min(2.5) * 8 - 20
    return logits


def sample(sampler: Sampler, logits: Tensor, openings: Sequence[Opening]) -> tuple[SampledToken, ...]:
    chunks = [Chunk(one.sequence, len(one.history) - 1, 1, None, samples=True) for one in openings]
    return sampler.sample(logits, chunks)


@pytest.mark.parametrize("size", [40, 1000, 4097, 32_003, 128_256])
def test_tokens_are_those_of_the_sequential_sampler_in_every_batch(size: int) -> None:
    chance = random.Random(size)
    openings, logits = drawn_openings(chance, size), logits_for(size, size)
    expected = [sampled_alone(row, one, len(one.history)) for row, one in zip(logits, openings, strict=True)]
    order = chance.sample(range(CASES), CASES)
    for places in ([[place] for place in range(CASES)], [order], _split(order, PER_STEP), _split(order, 3)):
        sampler = Sampler(size, CPU)
        for one in openings:
            sampler.open(one)
        for step in places:
            found = sample(sampler, logits[step], [openings[place] for place in step])
            for place, token in zip(step, found, strict=True):
                assert (token.token, token.logprob, token.top) == expected[place], openings[place].options


def _split(places: Sequence[int], count: int) -> list[Sequence[int]]:
    return [places[start : start + count] for start in range(0, len(places), count)]


def test_threads_do_not_change_tokens() -> None:
    size, chance = 70_001, random.Random(4)
    openings, logits = drawn_openings(chance, size), logits_for(size, 4)
    before = torch.get_num_threads()
    alone, together = Sampler(size, CPU), Sampler(size, CPU)
    for one in openings:
        alone.open(one)
        together.open(one)
    try:
        torch.set_num_threads(2)
        expected = [sample(alone, logits[[row]], [one])[0] for row, one in enumerate(openings)]
        assert list(sample(together, logits, openings)) == expected
    finally:
        torch.set_num_threads(before)


def test_a_sequence_that_continues_elsewhere_draws_the_same_tokens() -> None:
    """Penalties, bias and min_tokens are the same if another sampler continues after each token."""
    size, chance = 1000, random.Random(9)
    openings = drawn_openings(chance, size)
    stays = Sampler(size, CPU)
    for one in openings:
        stays.open(one)
    histories = [list(one.history) for one in openings]
    ended: set[int] = set()
    for step in range(12):
        logits = logits_for(size, step)
        chunks = [
            Chunk(number, len(history) - 1, 1, None, samples=True) for number, history in enumerate(histories)
        ]
        found = stays.sample(logits, chunks)
        for place, one in enumerate(openings):
            if place in ended:
                continue
            moved = Sampler(size, CPU)
            history = tuple(histories[place])
            moved.open(Opening(place, 128, one.options, history, one.prompt_tokens))
            assert moved.sample(logits[[place]], [chunks[place]]) == (found[place],)
            histories[place].append(found[place].token)
            if found[place].finish is not None:
                ended.add(place)
    assert len(ended) < CASES // 2


@pytest.mark.parametrize("size", [1000, 20_000])
def test_equal_and_broken_logits_are_sampled(size: int) -> None:
    """All tokens equal; one possible token; numbers that are not finite."""
    options = SamplingOptions(seed=1, max_tokens=1, top_p=0.5)
    ids = eligible(torch.ones(size), options)
    assert ids is not None
    assert len(ids) == size, "equally probable tokens are kept together"
    lonely, broken = torch.full((size,), -torch.inf), torch.zeros(size)
    lonely[size - 2] = 3.0
    broken[5] = torch.nan
    for logits, token in ((lonely, size - 2), (broken, 0), (torch.full((size,), -torch.inf), 0)):
        for rules in ({}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.1}):
            one = opening(1, [3], temperature=1.0, **rules)
            sampler = Sampler(size, CPU)
            sampler.open(one)
            assert sample(sampler, logits[None], [one])[0].token == token


def test_a_temperature_too_small_for_float32_is_greedy() -> None:
    one = opening(1, [3], temperature=1e-60)
    sampler = Sampler(1000, CPU)
    sampler.open(one)
    logits = logits_for(1000, 2)[:1]
    assert sample(sampler, logits, [one])[0].token == int(logits.argmax())
