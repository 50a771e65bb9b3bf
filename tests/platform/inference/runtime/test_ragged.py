"""Serving stages: their tokens are those of transformers, alone and in ragged batches, however the model is cut."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.platform.inference.runtime.stages import (
    CPU,
    LAYERS,
    MODELS,
    Serving,
    fill,
    generated,
    model_of,
    opening,
    prompt_of,
    small_config,
    stages_of,
)
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from share_compute.errors import UserError
from share_compute.inference.runtime.kv_slots import KVSlots, LayerCache
from share_compute.inference.runtime.packing import PackedLinear, pack
from share_compute.inference.runtime.stage import ServingStage
from share_compute.inference.scheduler.engine_steps import Chunk, SlotGrowth
from share_compute.shards import Shard

CUTS = {1: [(0, 3)], 2: [(0, 1), (1, 3)], 3: [(0, 1), (1, 2), (2, 3)]}
PROMPTS = {1: prompt_of(19, 1), 2: prompt_of(3, 2), 3: prompt_of(12, 3)}
PIECES = {1: [7, 9, 3], 2: [3], 3: [1, 11]}
"""Prompts are cut into chunks, and run beside tokens of sequences that decode."""
COUNT = 10


@pytest.mark.parametrize("num_stages", CUTS)
@pytest.mark.parametrize("model_type", MODELS)
def test_greedy_tokens_are_those_of_transformers(model_type: str, num_stages: int) -> None:
    expected = {sequence: generated(model_type, tuple(prompt), COUNT) for sequence, prompt in PROMPTS.items()}
    assert len({token for text in expected.values() for token in text}) > 12, (
        "a degenerate model proves nothing"
    )
    serving = Serving(stages_of(model_type, CUTS[num_stages]))
    alone = serving.run({opening(1, PROMPTS[1]): [len(PROMPTS[1])]}, COUNT)[1]
    assert alone == expected[1]
    serving.step(closes=[1])
    plans = {opening(sequence, prompt): PIECES[sequence] for sequence, prompt in PROMPTS.items()}
    assert serving.run(plans, COUNT) == expected


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma3_text"])
def test_a_prefix_is_taken_over(model_type: str) -> None:
    serving = Serving(stages_of(model_type, CUTS[2]))
    shared = prompt_of(15, 4)
    serving.run({opening(1, shared): [15]}, 4)
    longer = [*shared[:11], *prompt_of(6, 5)]
    copied = serving.run({opening(2, longer, copy_from=1, copy_tokens=11): [2, 4]}, COUNT)[2]
    assert copied == generated(model_type, tuple(longer), COUNT)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_a_slot_that_grows_keeps_what_it_holds(model_type: str) -> None:
    serving = Serving(stages_of(model_type, CUTS[2]))
    prompt = prompt_of(9)
    first = replace(opening(1, prompt), capacity_tokens=10)
    serving.step(Chunk(1, 0, 9, tuple(prompt), samples=True), opens=[first])
    serving.step(Chunk(1, 9, 1, None, samples=True))
    for start, capacity in ((10, 11), (11, 30)):
        serving.step(Chunk(1, start, 1, None, samples=True), grows=[SlotGrowth(1, capacity)])
    assert [stage.held_tokens for stage in serving.stages] == [30, 30]
    assert serving.texts[1] == generated(model_type, tuple(prompt), COUNT)[:4]


def test_a_slot_of_unequal_layers_grows() -> None:
    slots = KVSlots([LayerCache(2, 16, 8), LayerCache(1, 4, 4)], torch.float32, CPU)
    slots.open(1, 3)
    for number, view in enumerate(slots[1].between(0, 3)):
        view.fill_(number)
    slots.grow(1, 7)
    assert slots.held_tokens == 7
    assert [view.unique().tolist() for view in slots[1].between(0, 3)] == [[0], [1], [2], [3]]


def test_slots_are_counted_and_freed() -> None:
    (stage,) = stages_of("llama", CUTS[1])
    assert stage.bytes_per_token == LAYERS * 2 * 2 * 16 * 4
    serving = Serving([stage])
    serving.step(opens=[opening(1, [3, 4]), opening(2, [3, 4])])
    assert stage.held_tokens == 2 * 128
    assert serving.step(closes=[1]) == ()
    assert stage.held_tokens == 128
    stage.clear()
    assert stage.held_tokens == 0


def test_a_shard_loads_its_own_tensors(tmp_path: Path) -> None:
    model_of("qwen3").save_pretrained(tmp_path)
    stages = [ServingStage(small_config("qwen3"), Shard("m", *cut, LAYERS), CPU) for cut in CUTS[2]]
    assert not set(stages[0].tensors()) & set(stages[1].tensors())
    for stage in stages:
        stage.load(tmp_path)
    text = Serving(stages).run({opening(1, PROMPTS[1]): [19]}, COUNT)[1]
    assert text == generated("qwen3", tuple(PROMPTS[1]), COUNT)


def test_half_precision_is_loaded_as_such_and_near(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float16):
        stage = ServingStage(small_config("llama"), Shard("m", 0, 3, LAYERS), CPU, dtype)
        assert {tensor.dtype for tensor in stage.tensors().values()} == {dtype}
        assert stage.bytes_per_token == LAYERS * 2 * 2 * 16 * 2
        stage.load(tmp_path)
        serving = Serving([stage])
        (one,) = serving.step(
            Chunk(1, 0, 19, tuple(PROMPTS[1]), samples=True), opens=[opening(1, PROMPTS[1], logprobs=3)]
        )
        exact = model_of("llama")(torch.tensor([PROMPTS[1]])).logits[0, -1].log_softmax(-1)
        assert one.top[0][1] == pytest.approx(float(exact[one.top[0][0]]), abs=0.5)


def test_a_folder_of_another_size_is_refused(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path)
    config = {**small_config("llama"), "intermediate_size": 48}
    stage = ServingStage(config, Shard("m", 0, 3, LAYERS), CPU)
    with pytest.raises(UserError, match="where the configuration wants"):
        stage.load(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "sealed", [(True,), (False,), (True, False)], ids=["twice", "once", "once after all"]
)
def test_packed_weights_compute_the_same(tied: bool, sealed: tuple[bool, ...]) -> None:
    config = {
        **small_config("llama"),
        "hidden_size": 64,
        "intermediate_size": 8192,
        "vocab_size": 8192,
        "tie_word_embeddings": tied,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    model.requires_grad_(requires_grad=False).eval()
    stage = ServingStage(config, Shard("m", 0, 3, LAYERS), CPU)
    fill(stage, model, *sealed)
    packed = [part for part in stage.module.modules() if isinstance(part, PackedLinear)]
    assert bool(packed) == torch.backends.mkldnn.is_available()
    assert all(part.keeps_plain == sealed[-1] for part in packed)
    if packed:
        # Weights that a tied embedding holds are not packed: that would store them twice.
        assert isinstance(stage.module.lm_head, PackedLinear) == (sealed[-1] or not tied)
    serving = Serving([stage])
    for rows in (1, 2, 5):
        chunk = Chunk(rows, 0, rows, tuple(PROMPTS[1][:rows]), samples=True)
        (one,) = serving.step(chunk, opens=[opening(rows, PROMPTS[1], logprobs=1)])
        expected = model(torch.tensor([PROMPTS[1][:rows]])).logits[0, -1].log_softmax(-1)
        assert one.top[0][1] == pytest.approx(float(expected.max()), abs=1e-4)


@pytest.mark.parametrize("keeps_plain", [True, False])
def test_weights_are_packed_one_layer_after_the_other(
    keeps_plain: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    own = [weakref.ref(layer) for layer in layers]
    alive: list[int] = []
    build = PackedLinear.__init__

    def counting(self: PackedLinear, *arguments: Any, **options: Any) -> None:
        alive.append(sum(layer() is not None for layer in own))
        build(self, *arguments, **options)

    monkeypatch.setattr(PackedLinear, "__init__", counting)
    pack(layers, keeps_plain=keeps_plain)
    assert alive == [4, 3, 2, 1]


@pytest.mark.parametrize("window", [64, 96])
def test_stretched_positions_depend_on_the_window_alone(window: int) -> None:
    """If positions were scaled by the longest text of a batch, tokens would depend on the other sequences."""
    factors = [1.0 + place / 3 for place in range(8)]
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": factors,
            "original_max_position_embeddings": 64}  # fmt: skip
    config = {**small_config("llama"), "rope_parameters": rope}
    stage = ServingStage(config, Shard("m", 0, 3, LAYERS), CPU, window_tokens=window)
    rotary = next(part for part in stage.module.modules() if hasattr(part, "inv_freq"))
    before = rotary.inv_freq.clone()
    rotary(torch.empty(1), torch.tensor([[window + 50]]))
    assert torch.equal(rotary.inv_freq, before)
    stretched = not torch.equal(before, rotary.original_inv_freq)
    assert stretched == (window > 64)


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("qwen3_next", {"layer_types": ["linear_attention"] * 3}, "state beside"),
        ("deepseek_v32", {}, "has sparse attention, which reads only the tokens that it selects"),
        ("deepseek_v4", {}, "sparse attention"),
        ("doge", {}, "mask of its own"),
        ("gpt2", {}, "declares no pipeline plan"),
    ],
)
def test_what_cannot_be_served_is_refused(model_type: str, options: dict[str, Any], reason: str) -> None:
    wanted = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 160,
        **options,
    }
    config = AutoConfig.for_model(model_type, **wanted).to_dict()
    with pytest.raises(UserError, match=reason) as caught:
        ServingStage({**config, "model_type": model_type}, Shard("m", 0, 3, 3), CPU)
    assert caught.value.hint
