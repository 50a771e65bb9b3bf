"""Fused linear layers: each part has the outputs of the layer that it replaces, however a model calls the parts."""

from __future__ import annotations

import pytest
import torch
from tests.platform.inference.runtime.stages import CPU, LAYERS, fill, model_of, small_config
from tests.platform.models.huggingface.test_models import COMMON, REST
from tests.platform.models.huggingface.test_models import small_config as small_config_of
from tests.thoroughly import a_few
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from share_compute.inference.runtime.fusion import FusedLinear, FusedPart, fuse_linears
from share_compute.inference.runtime.quantization import Int8Linear, integers_of, scale_of
from share_compute.inference.runtime.stage import ServingStage
from share_compute.shards import Shard


class Attention(nn.Module):
    """Three projections of unequal sizes, and how often each set of weights was multiplied."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        for name, size in (("q_proj", 32), ("k_proj", 16), ("v_proj", 8)):
            setattr(self, name, nn.Linear(24, size, bias=bias))
        self.requires_grad_(requires_grad=False)

    def call(self, inputs: Tensor, order: str = "qkv") -> dict[str, Tensor]:
        return {name: getattr(self, f"{name}_proj")(inputs).clone() for name in order}


def count_products(attention: Attention) -> list[int]:
    """Record the number of rows of each product of the fused layer from now on."""
    rows: list[int] = []
    attention.q_proj.fused.layer.register_forward_hook(lambda _, given, __: rows.append(given[0].shape[-2]))
    return rows


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.allclose(found[name], expected[name], rtol=1e-6, atol=1e-6) for name in expected)


@pytest.mark.parametrize("order", ["qkv", "vkq", "kq", "qqkv"])
@pytest.mark.parametrize("bias", [False, True])
def test_parts_are_the_layers(order: str, *, bias: bool) -> None:
    plain, fused = Attention(bias=bias), Attention(bias=bias)
    fuse_linears(fused)
    for count in (1, 5, 1):
        inputs = torch.randn(1, count, 24)
        assert same(fused.call(inputs, order), plain.call(inputs, order))


def test_one_product_serves_all_parts() -> None:
    fused = Attention()
    fuse_linears(fused)
    rows = count_products(fused)
    for count in (2, 3):
        fused.call(torch.randn(1, count, 24))
    assert rows == [2, 3]


def test_inputs_that_change_between_the_calls_are_noticed() -> None:
    plain, fused = Attention(), Attention()
    fuse_linears(fused)
    for _ in range(3):
        inputs = torch.randn(1, 2, 24)
        for name in ("q_proj", "k_proj", "v_proj"):
            assert torch.allclose(getattr(fused, name)(inputs), getattr(plain, name)(inputs), atol=1e-6)
            inputs *= 2


def test_a_part_has_the_weights_of_its_layer() -> None:
    plain, fused = Attention(), Attention()
    fuse_linears(fused)
    for name in ("q_proj", "k_proj", "v_proj"):
        part = getattr(fused, name)
        assert torch.equal(part.weight, getattr(plain, name).weight)
        assert (part.in_features, part.out_features) == (24, part.weight.shape[0])


def test_other_layers_are_left_as_they_are() -> None:
    shared, mixed, unequal = Attention(), Attention(), Attention()
    shared.extra = nn.Linear(24, 16, bias=False)
    shared.extra.weight = shared.k_proj.weight
    mixed.v_proj = nn.Linear(24, 8)
    unequal.v_proj = nn.Linear(12, 8, bias=False)
    for attention in (shared, mixed, unequal):
        fuse_linears(attention)
        assert not any(isinstance(part, FusedPart) for part in attention.modules())


def test_integers_are_fused_to_the_bit() -> None:
    plain, fused = Attention(), Attention()
    for attention in (plain, fused):
        for name, layer in list(attention.named_children()):
            weight = layer.weight.clone()
            quantized = Int8Linear(layer)
            scale = scale_of(weight)
            quantized.int8 = nn.Parameter(integers_of(weight, scale), requires_grad=False)
            quantized.int8_scale = nn.Parameter(scale, requires_grad=False)
            setattr(attention, name, quantized)
    fuse_linears(fused)
    for count in (1, 40):
        inputs = torch.randn(1, count, 24)
        found, expected = fused.call(inputs), plain.call(inputs)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_stage_holds_each_matrix_once() -> None:
    stage = ServingStage(small_config("llama"), Shard("m", 0, LAYERS, LAYERS), CPU)
    before = sum(tensor.numel() for tensor in stage.tensors().values() if tensor.dim() > 1)
    fill(stage, model_of("llama"))
    after = {name: tensor.numel() for name, tensor in stage.tensors().items() if tensor.dim() > 1}
    assert sum(after.values()) == before
    assert sum(".fused." in name for name in after) == 2 * LAYERS


@pytest.mark.parametrize("model_type", a_few([*COMMON, *REST], 8))
def test_fused_models_compute_the_same(model_type: str) -> None:
    torch.manual_seed(1)
    config = AutoConfig.for_model(**small_config_of(model_type))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.randint(3, 160, (2, 24))
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        fuse_linears(model)
        for _ in range(2):
            torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
    for part in model.modules():
        assert not isinstance(part, FusedLinear) or part.keeps_outputs
