"""The search for the first place with numbers that are not finite, which changes nothing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage
from share_compute.models.losses import loss_sum
from share_compute.models.stage import Stage
from share_compute.shards import Shard
from share_compute.training.finiteness import NonFiniteValue, find_nonfinite, first_of

CONFIG = CONFIG_MAPPING["llama"](
    hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, vocab_size=40,
    max_position_embeddings=64,
).to_dict()  # fmt: skip
IDS = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(1))


def stages() -> list[Stage]:
    blueprint = Blueprint(config={**CONFIG, "model_type": "llama"}, activation_checkpointing=True)
    made = [build_stage(blueprint, Shard("m", start, start + 2, 4), torch.device("cpu")) for start in (0, 2)]
    for stage in made:
        stage.initialize(1)
        stage.module.train()
        stage.prepare_cell(1, 1, 3)
    return made


def findings(both: list[Stage]) -> list[NonFiniteValue | None]:
    """Search both stages, given the tensors that crossed the boundary between them."""
    first, last = both
    crossing = first.forward(IDS).detach().requires_grad_()
    loss_of = partial(loss_sum, targets=IDS)
    (gradient,) = torch.autograd.grad(loss_of(last.forward(crossing)), [crossing])
    return [
        find_nonfinite(first, 0, 3, IDS, gradient),
        find_nonfinite(last, 1, 3, crossing.detach(), loss_of),
    ]


def test_nothing_is_found_where_all_is_finite() -> None:
    both = stages()
    parameter = next(both[0].module.parameters())
    parameter.grad = held = torch.ones_like(parameter)
    assert findings(both) == [None, None]
    assert parameter.grad is held
    assert torch.equal(held, torch.ones_like(parameter))


@pytest.mark.parametrize(
    ("name", "stage"),
    [("model.layers.1.mlp.up_proj", 0), ("model.layers.2.self_attn.v_proj", 1), ("lm_head", 1)],
)
def test_the_module_is_named_whose_output_is_not(name: str, stage: int) -> None:
    both = stages()
    with torch.no_grad():
        both[stage].parameters()[f"{name}.weight"][3] = torch.inf
    cause = first_of(findings(both))
    assert cause is not None
    assert (cause.way, cause.stage, cause.microbatch, cause.name) == ("forward", stage, 3, name)
    error = cause.error(5)
    assert error.message == f"numbers are not finite at step 5: first output of {name} (microbatch 3)"
    assert error.hint


def test_a_gradient_that_overflows_is_found_on_the_way_back() -> None:
    class Steep(torch.autograd.Function):
        @staticmethod
        def forward(_: object, values: Tensor) -> Tensor:
            return values.clone()

        @staticmethod
        def backward(_: object, gradient: Tensor) -> Tensor:
            return gradient * torch.inf

    both = stages()
    target = both[1].module.get_submodule("model.layers.3.mlp.down_proj")
    target.register_forward_pre_hook(lambda _, inputs: (Steep.apply(inputs[0]),))
    found = findings(both)
    cause = first_of(found)
    assert cause is not None
    assert (cause.way, cause.stage) == ("backward", 1)
    assert cause.name.startswith("model.layers.3.mlp.")
    assert found[0] is None  # its input is not finite already: the cause is not here


def test_forward_goes_before_backward_and_the_nearest_to_the_cause_first() -> None:
    back = [NonFiniteValue("backward", stage, 0, "a") for stage in (0, 1, 2)]
    ahead = [NonFiniteValue("forward", stage, 4, "b") for stage in (2, 1)]
    assert first_of([None, *back]) == back[2]
    assert first_of([*back, None, *ahead]) == ahead[1]
    assert first_of([None]) is None
