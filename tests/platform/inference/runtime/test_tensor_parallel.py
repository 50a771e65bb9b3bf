"""Models that ranks cannot divide are refused with a reason; of a mixture, each rank has a part of every expert."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from tests.platform.inference.runtime.stages import CPU, LAYERS, MODELS, SMALL, fill, model_of, small_config
from torch import Tensor, nn

from share_compute.errors import UserError
from share_compute.inference.runtime.stage import ServingStage
from share_compute.inference.runtime.tensor_parallel import (
    RankGroup,
    SummedExperts,
    SummedLinear,
    require_divisible,
)
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
            "mixtral",
            {"intermediate_size": 72},
            2,
            "2 ranks cannot share the 72 inputs of model.layers.0.mlp.experts.down_proj in multiples of 8",
        ),
        (
            "qwen2_moe",
            {"shared_expert_intermediate_size": 63},
            2,
            "63 outputs of .*mlp.shared_expert.gate_proj",
        ),
        # Its shared experts have a plan, and its attention has none.
        ("deepseek_v3", {"n_routed_experts": 4}, 2, "no plan for architecture 'deepseek_v3'"),
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
    for model_type in ("llama", "gemma2", "gpt_neox", "mixtral", "qwen2_moe", "qwen3_moe"):
        require_divisible(small_config(model_type), 2)


@pytest.mark.parametrize("bias", [torch.ones(3), None])
def test_a_part_moves_to_a_device_as_a_whole(bias: Tensor | None) -> None:
    layer = SummedLinear(nn.Linear(4, 3, bias=False), bias, Ranks(0, 2))
    assert layer(torch.zeros(2, 4)).tolist() == ([[1.0] * 3] * 2 if bias is not None else [[0.0] * 3] * 2)
    moved = layer.to("meta")(torch.zeros(2, 4, device="meta"))
    assert (moved.shape, moved.device.type) == ((2, 3), "meta")


def experts_of(stage: ServingStage) -> int:
    """Return the number of weights of experts in a stage."""
    return sum(parameter.numel() for parameter in stage.module.parameters() if parameter.dim() == 3)


def test_each_rank_keeps_its_part_of_every_expert() -> None:
    config, shard = small_config("qwen2_moe"), Shard("m", 0, LAYERS, LAYERS)
    whole = experts_of(ServingStage(config, shard, CPU))
    for rank in range(4):
        stage = TensorStage(config, shard, Ranks(rank, 4))
        fill(stage, model_of("qwen2_moe"))
        assert experts_of(stage) == whole / 4


@dataclass
class Recorded:
    """A rank that is called when all ranks before it have returned; it adds their parts to its own."""

    rank: int
    sums: list[Tensor]
    count: int = 2

    def __post_init__(self) -> None:
        self._places = iter(range(9))

    def sum(self, part: Tensor) -> Tensor:
        place = next(self._places)
        if self.rank == 0:
            self.sums.append(part)
        return part if self.rank == 0 else self.sums[place] + part

    def gather(self, part: Tensor) -> Tensor:
        return part


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_use_the_choices_of_the_first_one(dtype: torch.dtype) -> None:
    whole = model_of("mixtral").model.layers[0].mlp.experts

    def part(group: RankGroup) -> SummedExperts:
        """Return the experts with a half of the width, which has the other weights set to zero."""
        experts = deepcopy(whole).to(dtype)
        own = torch.arange(64) // 32 == group.rank
        experts.down_proj.mul_(own)
        return SummedExperts(experts, group)

    source, sums = torch.Generator().manual_seed(3), list[Tensor]()
    hidden = torch.randn(5, 32, generator=source).to(dtype)
    weights, index = torch.rand(5, 4, generator=source).topk(2)
    part(Recorded(0, sums))(hidden, index, weights.to(dtype))
    expected = deepcopy(whole).to(dtype)(hidden, index, weights.to(dtype))
    found = part(Recorded(1, sums))(hidden, (index + 1) % 4, weights.flip(0).to(dtype))
    assert torch.allclose(found, expected, atol=1e-5 if dtype == torch.float32 else 0.1)
