"""Devices that each compute some experts of a mixture compute together what one device does, for every routing."""

from __future__ import annotations

import pytest
import torch
from tests.platform.models.huggingface.test_models import small_config
from torch import Tensor, nn

from share_compute.errors import UserError
from share_compute.models.blueprint import Blueprint, blueprint_of
from share_compute.models.factory import build_stage
from share_compute.models.huggingface.experts import computed_experts, is_experts
from share_compute.models.stage import Stage
from share_compute.shards import Shard
from share_compute.specification import parse_job

CPU = torch.device("cpu")
TOKENS, FEATURES, EXPERTS = 10, 64, 4
ROUTES = {
    "drawn": torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(TOKENS)]),
    "one device": torch.tensor([[1, 0]]).repeat(TOKENS, 1),
    "one expert": torch.zeros(TOKENS, 2, dtype=torch.int64),
    "nowhere": torch.full((TOKENS, 2), EXPERTS),
}


def stage_of(model_type: str, **options: object) -> Stage:
    stage = build_stage(Blueprint(config=small_config(model_type, **options)), Shard("m", 0, 4, 4), CPU)
    stage.initialize(1)
    return stage


def experts_of(model_type: str) -> nn.Module:
    return next(module for module in stage_of(model_type).module.modules() if is_experts(module))


def computed(run: object, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return an output, and the gradients of hidden states, weights and parameters."""
    hidden, index, *others = tensors
    leaves = [each.detach().clone().requires_grad_() for each in (hidden, *others)]
    output = run([leaves[0], index, *leaves[1:]])  # type: ignore[operator]
    target = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    return output.detach(), list(torch.autograd.grad((output * target).sum(), leaves))


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "gpt_oss"])
@pytest.mark.parametrize("routing", ROUTES)
@pytest.mark.parametrize("devices", [2, 4])
def test_parts_add_up(model_type: str, routing: str, devices: int) -> None:
    module = experts_of(model_type)
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, FEATURES, generator=draw)
    weights = torch.rand(TOKENS, 2, generator=draw)
    parameters = [each.detach() for each in module.parameters()]
    given = [hidden, ROUTES[routing], weights]
    output, gradients = computed(lambda tensors: computed_experts(module, tensors, 0), [*given, *parameters])
    if routing != "nowhere":
        assert torch.equal(output, module(*given))
    count = EXPERTS // devices
    parts = []
    for rank in range(devices):
        own = [each[rank * count : (rank + 1) * count] for each in parameters]
        parts.append(
            computed(
                lambda tensors, first=rank * count: computed_experts(module, tensors, first), [*given, *own]
            )
        )
    torch.testing.assert_close(sum(part for part, _ in parts), output, atol=1e-6, rtol=0)
    found = [list(each) for each in zip(*(own for _, own in parts), strict=True)]
    summed = [sum(found[0]), sum(found[1]), *(torch.cat(each) for each in found[2:])]
    for one, several in zip(gradients, summed, strict=True):
        torch.testing.assert_close(several, one, atol=1e-5, rtol=0)
    reached = set(ROUTES[routing].flatten().tolist())
    for expert in range(EXPERTS):
        rows = [each[expert] for each in summed[2:]]
        assert any(bool(each.any()) for each in rows) is (expert in reached)


def test_noise_of_routers_is_repeated_with_the_cell() -> None:
    stage = stage_of("mixtral", router_jitter_noise=0.1)
    stage.module.train()
    ids = torch.arange(16)[None]
    found = []
    for _ in range(2):
        stage.prepare_cell(1, 2, 3)
        found.append(stage.forward(ids))
    assert torch.equal(*found)


def test_the_auxiliary_loss_of_routers_is_refused_in_training() -> None:
    config = small_config("mixtral", output_router_logits=True)
    job = parse_job(
        {"model": {"config": config}, "data": {"files": ["a.txt"]}, "training": {"sequence_length": 8}}
    )
    with pytest.raises(UserError, match="output_router_logits: the auxiliary loss") as refused:
        blueprint_of(job, 160)
    assert "output_router_logits to false" in str(refused.value.hint)
    stage = stage_of("mixtral", output_router_logits=True)  # a served model needs no loss
    assert stage.forward(torch.arange(8)[None]).shape == (1, 8, 160)
