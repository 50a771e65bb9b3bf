"""Jobs whose model ranks cannot compute are refused with the reason, before they have members."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from share_compute.errors import UserError
from share_compute.models.blueprint import blueprint_of
from share_compute.sharding.layer_plans import planned, require_parallelism
from share_compute.specification import TrainJob, parse_job
from share_compute.specification.placement.operators import NO_STRATEGIES

LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def job(parallelism: dict[str, Any], **config: Any) -> TrainJob:
    return parse_job(
        {
            "model": {"config": {**LLAMA, **config}},
            "data": {"files": ["a.txt"]},
            "tokenizer": {"vocab_size": 320},
            "training": {"batch_size": 4, "sequence_length": 16},
            "parallelism": parallelism,
        }
    )


@pytest.mark.parametrize(
    ("parallelism", "config", "message"),
    [
        (
            {"tensor": 2},
            {"attention_dropout": 0.1},
            "parallelism.tensor: no layer of the stage with layers 0 to 2 can .* 2 ranks: layer 0: .* draws random",
        ),
        ({"tensor": 3}, {}, "parallelism.tensor: no layer .* between 3 ranks: layer 0: no way to divide it"),
        (
            {"tensor": 2, "operators": {"strategies": {"mlp.nothing": "row"}}},
            {},
            "parallelism.operators.strategies: no operator matches 'mlp.nothing'",
        ),
        (
            {"tensor": 3, "operators": {"strategies": {"mlp.up_proj": "column"}}},
            {},
            "parallelism.operators.strategies: mlp.up_proj cannot have the strategy column: .* divide 128 evenly",
        ),
        ({"sequence": 2}, {"attention_dropout": 0.1}, "parallelism.sequence: attention_dropout is 0.1"),
    ],
)
def test_models_that_cannot_be_computed_so_are_refused(
    parallelism: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    spec = job(parallelism, **config)
    with pytest.raises(UserError, match=f"^{message}") as refused:
        require_parallelism(blueprint_of(spec, 320), spec)
    assert refused.value.hint


class Fickle(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + 1 if hidden.sum() > 0 else hidden


def test_a_layer_whose_control_flow_depends_on_data_is_not_divided() -> None:
    reason = planned(Fickle(), ((torch.zeros(2, 4),), {}), 2, NO_STRATEGIES)
    assert isinstance(reason, str)
    assert "Fickle" in reason
    assert "data" in reason or "no fixed graph" in reason


def test_models_that_can_be_computed_so_pass() -> None:
    for parallelism in ({"tensor": 2}, {"tensor": 4}, {}):
        spec = job(parallelism)
        require_parallelism(blueprint_of(spec, 320), spec)
