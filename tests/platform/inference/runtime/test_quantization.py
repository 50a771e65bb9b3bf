"""Weights in eight bits: close to the float weights, the same in every batch, with a quarter of the memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.platform.inference.runtime.stages import (
    CPU,
    LAYERS,
    Serving,
    model_of,
    opening,
    prompt_of,
    small_config,
)
from torch import nn

from share_compute.errors import UserError
from share_compute.inference.runtime.quantization import (
    Int8Linear,
    integers_of,
    quantize,
    require_linear_layers,
    scale_of,
    weight_of,
)
from share_compute.inference.runtime.stage import ServingStage
from share_compute.inference.scheduler.engine_steps import Chunk
from share_compute.models.huggingface.decoder import sketch
from share_compute.shards import Shard

CUTS = [(0, 1), (1, 3)]


def layer_of(out_features: int, in_features: int, *, bias: bool = True) -> tuple[nn.Linear, Int8Linear]:
    torch.manual_seed(out_features)
    plain = nn.Linear(in_features, out_features, bias=bias)
    made = Int8Linear(plain)
    scale = scale_of(plain.weight.detach())
    made.int8 = nn.Parameter(integers_of(plain.weight.detach(), scale), requires_grad=False)
    made.int8_scale = nn.Parameter(scale, requires_grad=False)
    return plain, made


@torch.inference_mode()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [160, 12, 20, 172, 4100])
@pytest.mark.parametrize("rows", [1, 7, 16, 17, 200])
def test_products_are_near_those_of_floats(rows: int, size: int, bias: bool) -> None:
    plain, made = layer_of(97, size, bias=bias)
    inputs = torch.randn(1, rows, size)
    expected = plain(inputs)
    found = made(inputs)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert float((found - expected).norm() / expected.norm()) < 0.015


@torch.inference_mode()
def test_a_row_does_not_depend_on_its_batch() -> None:
    _, made = layer_of(3000, 2048)  # of several blocks
    inputs = torch.randn(100, 2048)
    together = made(inputs)
    for start, stop in ((0, 1), (5, 13), (40, 56)):
        assert torch.allclose(made(inputs[start:stop]), together[start:stop], rtol=1e-2, atol=1e-3)
    for rows in range(2, 17):
        assert torch.equal(made(inputs[:rows])[1], made(inputs[1:2])[0])


def test_the_largest_number_of_a_row_is_kept() -> None:
    rows = torch.tensor([[0.5, -2.0, 0.0], [0.0, 0.0, 0.0]])
    scale = scale_of(rows)
    integers = integers_of(rows, scale)
    assert integers.tolist() == [[32, -127, 0], [0, 0, 0]]
    assert torch.allclose(integers * scale[:, None], rows, atol=0.01)


def test_what_is_not_finite_is_refused() -> None:
    with pytest.raises(UserError, match=r"lm_head\.weight has a number that is not finite"):
        scale_of(torch.tensor([[1.0, float("nan")]]), "lm_head.weight")


def test_names() -> None:
    assert weight_of("model.layers.0.mlp.up_proj.int8") == "model.layers.0.mlp.up_proj.weight"
    assert weight_of("model.layers.0.mlp.up_proj.int8_scale") == "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def stages(tmp_path: Path) -> list[ServingStage]:
    return stages_in_int8("llama", tmp_path)


def stages_in_int8(model_type: str, folder: Path, cuts: list[tuple[int, int]] = CUTS) -> list[ServingStage]:
    model_of(model_type).save_pretrained(folder)
    made = []
    for cut in cuts:
        stage = ServingStage(small_config(model_type), Shard("m", *cut, LAYERS), CPU, quantizes=True)
        stage.load(folder)
        made.append(stage)
    return made


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2", "phi3", "gpt_neox"])
def test_logits_are_near_and_batches_do_not_matter(model_type: str, tmp_path: Path) -> None:
    serving = Serving(stages_in_int8(model_type, tmp_path))
    prompts = {sequence: prompt_of(length, sequence) for sequence, length in ((1, 19), (2, 3), (3, 12))}
    together = serving.run({opening(one, prompt): [len(prompt)] for one, prompt in prompts.items()}, 8)
    serving.step(closes=list(prompts))
    for one, prompt in prompts.items():
        pieces = [1, len(prompt) - 1]
        assert serving.run({opening(one, prompt): pieces}, 8)[one] == together[one]
        serving.step(closes=[one])


def test_a_shard_takes_about_a_quarter(stages: list[ServingStage]) -> None:
    sizes = [sum(tensor.nbytes for tensor in stage.tensors().values()) for stage in stages]
    plain = ServingStage(small_config("llama"), Shard("m", *CUTS[1], LAYERS), CPU)
    assert sizes[1] < 0.35 * sum(tensor.nbytes for tensor in plain.tensors().values())


def test_layers_that_are_held_are_taken_over(stages: list[ServingStage]) -> None:
    _, last = stages
    wider = ServingStage(small_config("llama"), Shard("m", 0, LAYERS, LAYERS), CPU, quantizes=True)
    missing = wider.take_over(last)
    assert missing
    assert not any(name.startswith(("model.layers.1.", "model.layers.2.", "lm_head")) for name in missing)


def test_architectures_of_other_layers_are_refused() -> None:
    with pytest.raises(UserError, match="linear layers"):
        require_linear_layers(sketch(small_config("gpt_oss")), set())
    require_linear_layers(sketch(small_config("llama")), set())


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path)
    wider = {**small_config("llama"), "intermediate_size": 80}
    stage = ServingStage(wider, Shard("m", 0, LAYERS, LAYERS), CPU, quantizes=True)
    with pytest.raises(UserError, match=r"has the shape .* where the configuration wants"):
        stage.load(tmp_path)


def test_tied_heads_stay_as_they_are() -> None:
    model = nn.Module()
    model.embed, model.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    model.layer = nn.Linear(4, 4)
    quantize(model, {"embed.weight", "head.weight"})
    assert type(model.head) is nn.Linear
    assert isinstance(model.layer, Int8Linear)


def test_a_chunk_may_be_long(stages: list[ServingStage]) -> None:
    prompt = prompt_of(60)
    serving = Serving(stages)
    whole = serving.step(Chunk(1, 0, 60, tuple(prompt), samples=True), opens=[opening(1, prompt)])
    serving.step(closes=[1])
    serving.step(Chunk(1, 0, 20, tuple(prompt[:20]), samples=False), opens=[opening(1, prompt)])
    cut = serving.step(Chunk(1, 20, 40, tuple(prompt[20:]), samples=True))
    assert [one.token for one in whole] == [one.token for one in cut]
