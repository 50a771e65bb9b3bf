"""Models that ranks cannot divide are refused with a reason."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from tests.platform.inference.runtime.stages import LAYERS, MODELS, SMALL, small_config
from torch import Tensor, nn

from share_compute.errors import UserError
from share_compute.inference.runtime.tensor_parallel import SummedLinear, require_divisible
from share_compute.inference.runtime.tensor_stage import TensorStage
from share_compute.shards import Shard


class Ranks(NamedTuple):
    rank: int
    count: int

    def sum(self, part: Tensor) -> Tensor:
        return part

    def gather(self, part: Tensor) -> Tensor:
        return part


@pytest.mark.parametrize(
    ("model_type", "wider", "count", "problem"),
    [
        ("llama", {}, 4, "4 ranks cannot share 2 KV heads evenly"),
        (
            "llama",
            {"intermediate_size": 63},
            2,
            r"2 ranks cannot share the 63 outputs of model.layers.0.mlp.gate",
        ),
        ("phi3", {}, 2, "no plan for architecture 'phi3' that gives each rank its own heads"),
        ("gpt_oss", {}, 2, "no plan for architecture 'gpt_oss'"),
        ("youtu", {}, 2, "no plan for architecture 'youtu'"),  # its attention is computed as a whole
        (
            "cohere",
            {"use_qk_norm": True},
            2,
            "no plan for architecture 'cohere'",
        ),  # norms with rows for heads
    ],
)
def test_models_that_ranks_cannot_divide_are_refused(
    model_type: str, wider: dict[str, int | bool], count: int, problem: str
) -> None:
    small = small_config(model_type) if model_type in MODELS else {**SMALL, "model_type": model_type}
    config = {**small, **wider}
    with pytest.raises(UserError, match=f"^parallelism.tensor: .*{problem}") as refused:
        TensorStage(config, Shard("m", 0, LAYERS, LAYERS), Ranks(0, count))
    assert refused.value.hint
    # The check before a deployment is queued says the same, without weights.
    with pytest.raises(UserError) as early:
        require_divisible(config, count)
    assert (early.value.message, early.value.hint) == (refused.value.message, refused.value.hint)


def test_models_that_ranks_can_divide_pass_the_early_check() -> None:
    for model_type in ("llama", "gemma2", "gpt_neox"):
        require_divisible(small_config(model_type), 2)


@pytest.mark.parametrize("bias", [torch.ones(3), None])
def test_a_part_moves_to_a_device_as_a_whole(bias: Tensor | None) -> None:
    layer = SummedLinear(nn.Linear(4, 3, bias=False), bias, Ranks(0, 2))
    assert layer(torch.zeros(2, 4)).tolist() == ([[1.0] * 3] * 2 if bias is not None else [[0.0] * 3] * 2)
    moved = layer.to("meta")(torch.zeros(2, 4, device="meta"))
    assert (moved.shape, moved.device.type) == ((2, 3), "meta")
