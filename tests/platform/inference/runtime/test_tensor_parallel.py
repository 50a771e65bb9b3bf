"""Models that ranks cannot divide are refused with a reason."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from tests.platform.inference.runtime.stages import LAYERS, MODELS, SMALL, small_config
from torch import Tensor

from share_compute.errors import UserError
from share_compute.inference.runtime.tensor_parallel import require_divisible
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
