"""Batch norm with statistics of microbatches: it computes what torch computes, and sums statistics in a fixed order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from share_compute.errors import UserError
from share_compute.models.batch_norm import (
    BatchNorm1d,
    BatchNorm2d,
    running_statistics,
    update_statistic,
    update_statistics,
)
from share_compute.models.blueprint import blueprint_of
from share_compute.models.factory import build_stage, dissect
from share_compute.models.layers import require_fit
from share_compute.protocol.tree import SummationTree
from share_compute.shards import Shard
from share_compute.specification import TrainJob, parse_job
from share_compute.training.gradients import GradientBuckets
from share_compute.training.optimizers import undecayed_parameters

CPU = torch.device("cpu")
MICROBATCHES = 4
IMAGES = {"type": "unflatten", "options": {"dim": 1, "unflattened_size": [1, 8, 8]}}


def norm(channels: int, kind: str = "batch_norm2d", **options: Any) -> dict[str, Any]:
    return {"type": kind, "options": {"num_features": channels, **options}}


def job(layers: list[dict[str, Any]], **training: Any) -> TrainJob:
    return parse_job(
        {
            "model": {"layers": [IMAGES, *layers]},
            "data": {"dataset": "digits"},
            "training": {"steps": 1, "batch_size": 16, "microbatches": MICROBATCHES, **training},
        }
    )


NETWORK: list[dict[str, Any]] = [
    {"type": "conv2d", "options": {"in_channels": 1, "out_channels": 4, "kernel_size": 3}},
    {"type": "residual", "layers": [norm(4, momentum=0.3), {"type": "relu"}]},
    {"type": "flatten"},
    {"type": "linear", "options": {"in_features": 144, "out_features": 10}},
]


@pytest.mark.parametrize(("kind", "peer", "shape"), [
    (BatchNorm1d, nn.BatchNorm1d, (6, 5)),
    (BatchNorm1d, nn.BatchNorm1d, (6, 5, 7)),
    (BatchNorm2d, nn.BatchNorm2d, (6, 5, 3, 4)),
])  # fmt: skip
@pytest.mark.parametrize("affine", [True, False])
def test_outputs_gradients_and_statistics_are_those_of_torch(
    kind: type[BatchNorm1d], peer: type[nn.BatchNorm1d], shape: tuple[int, ...], affine: bool
) -> None:
    ours, theirs = kind(5, momentum=0.2, affine=affine), peer(5, momentum=0.2, affine=affine)
    inputs, given = torch.randn(shape), torch.randn(shape)
    leaves = [inputs.clone().requires_grad_() for _ in range(2)]
    for module, leaf in zip((ours, theirs), leaves, strict=True):
        outputs = module(leaf)
        outputs.backward(given)
        if module is ours:
            expected = outputs.detach()
        else:
            assert torch.equal(outputs, expected)
    assert torch.equal(leaves[0].grad, leaves[1].grad)  # type: ignore[arg-type]
    if affine:
        assert torch.equal(ours.weight.grad, theirs.weight.grad)  # type: ignore[union-attr, arg-type]
    for name, momentum in running_statistics(ours).items():
        running = ours.get_parameter(name)
        assert running.grad is not None
        update_statistic(name, running, running.grad, momentum, 1)
        assert torch.allclose(running, theirs.get_buffer(name), atol=1e-6)
    ours.eval()
    theirs.eval()
    assert torch.allclose(ours(inputs), theirs(inputs), atol=1e-5)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    assert torch.equal(ours(inputs), theirs(inputs))


def test_running_statistics_are_the_mean_over_the_microbatches_of_a_step() -> None:
    module = BatchNorm2d(3, momentum=0.3)
    inputs = torch.randn(8, 3, 5, 5) * 2 + 1
    for some in inputs.chunk(MICROBATCHES):
        module(some).sum().backward()
    for name, momentum in running_statistics(module).items():
        running = module.get_parameter(name)
        assert running.grad is not None
        update_statistic(name, running, running.grad, momentum, MICROBATCHES)
    means = torch.stack([some.mean((0, 2, 3)) for some in inputs.chunk(MICROBATCHES)])
    variances = torch.stack([some.var((0, 2, 3)) for some in inputs.chunk(MICROBATCHES)])
    assert torch.allclose(module.running_mean, 0.3 * means.mean(0), atol=1e-6)
    assert torch.allclose(module.running_var, 0.7 + 0.3 * variances.mean(0), atol=1e-6)


@pytest.mark.parametrize("first", [0.1, 1.7, 3.3])
def test_the_variance_of_a_channel_that_becomes_constant_is_not_negative(first: float) -> None:
    module = BatchNorm1d(400, momentum=1.0)
    with torch.no_grad():
        module.running_var.copy_(first + torch.rand(400, generator=torch.Generator().manual_seed(0)))
    for _ in range(3):
        inputs = torch.ones(12, 400)
        inputs += 1e-4 * torch.rand(12, 400, generator=torch.Generator().manual_seed(1))
        for _ in range(3):
            module(inputs).sum().backward()
        update_statistics(dict(module.named_parameters()), running_statistics(module), 3)
        module.zero_grad()
        assert module.running_var.min() >= 0
        assert module.running_mean.min() > 0
    module.running_mean.data.neg_()
    update_statistic("running_mean", module.running_mean, torch.zeros(400), 1.0, 3)
    assert module.running_mean.max() < 0  # only variances are bounded
    module.eval()
    assert module(torch.ones(2, 400)).isfinite().all()


def trained(order: list[list[int]]) -> dict[str, Tensor]:
    """Return the sums of all parameters when each member computes its microbatches in the given order."""
    spec, tree = job(NETWORK), SummationTree((2, 2))
    samples = torch.rand(MICROBATCHES, 4, 64, generator=torch.Generator().manual_seed(0))
    members = []
    for own in order:
        stage = build_stage(blueprint_of(spec, None), Shard("m", 0, 5, 5), CPU)
        stage.initialize(0)
        buckets = GradientBuckets(stage.parameters(), tree)
        for microbatch in own:
            buckets.begin(microbatch)
            stage.forward(samples[microbatch]).square().sum().backward()  # type: ignore[no-untyped-call]
            buckets.finish()
        members.append((stage, buckets))
    parts = {
        node: [part.clone() for part in _parts(buckets, place)]
        for _, buckets in members
        for place, node in enumerate(buckets.held)
    }
    (stage, buckets) = members[0]
    held = [node for _, each in members for node in each.held]
    while len(parts) > 1:
        for node in sorted(held):
            for left, right, parent in tree.merges(set(parts) - {node}, node):
                parts[parent] = [a + b for a, b in zip(parts.pop(left), parts.pop(right), strict=True)]
    (whole,) = parts.values()
    for bucket, values in enumerate(whole):
        buckets.result(bucket).copy_(values)
    buckets.settle()
    return {name: each.grad for name, each in stage.parameters().items() if each.grad is not None}


def _parts(buckets: GradientBuckets, place: int) -> list[Tensor]:
    return [buckets.parts(bucket)[place] for bucket in range(len(buckets))]


@pytest.mark.parametrize("order", [[[0, 1], [2, 3]], [[2, 3], [0, 1]]])
def test_sums_of_statistics_do_not_depend_on_the_members(order: list[list[int]]) -> None:
    alone, shared = trained([[0, 1, 2, 3]]), trained(order)
    assert "layers.2.layers.0.running_var" in alone
    assert all(torch.equal(alone[name], value) for name, value in shared.items())


def test_frozen_statistics_normalize_in_training() -> None:
    frozen = job(NETWORK, freeze=["*.running_*"])
    stage = build_stage(blueprint_of(frozen, None), Shard("m", 0, 5, 5), CPU)
    stage.initialize(0)
    inputs = torch.rand(4, 64)
    assert stage.statistics() == {}
    training = stage.forward(inputs)
    stage.module.eval()
    assert torch.equal(training, stage.forward(inputs))


def test_statistics_alone_are_nothing_to_train() -> None:
    frozen = blueprint_of(job(NETWORK, freeze=["*.weight", "*.bias"]), None)
    with pytest.raises(UserError, match=r"training.freeze leaves nothing to train"):
        dissect(frozen)
    dissect(blueprint_of(job(NETWORK, freeze=["*.weight"]), None))


def test_statistics_are_saved_and_have_no_weight_decay() -> None:
    blueprint = blueprint_of(job(NETWORK), None)
    require_fit(blueprint)
    assert dissect(blueprint).counted
    stage = build_stage(blueprint, Shard("m", 0, 5, 5), CPU)
    names = {f"layers.2.layers.0.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var")}
    assert names <= stage.persistent().keys()
    assert stage.statistics() == {f"layers.2.layers.0.running_{leaf}": 0.3 for leaf in ("mean", "var")}
    undecayed = set(undecayed_parameters(stage.module))
    assert all(stage.parameters()[name] in undecayed for name in names)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"microbatches": None}, r"batch_norm2d has the statistics of each microbatch: give training\.microbatches"),
        ({"microbatches": 16}, "batch_norm2d needs microbatches of 2 samples"),
        (
            {"steps": 60, "synchronization": {"kind": "local", "branches": 2}},
            r"training\.synchronization: only allreduce is possible with batch_norm2d.*group_norm",
        ),
        (
            {"compression": {"name": "int8", "error_feedback": None}},
            r"training\.compression: only none is possible with batch_norm2d.*group_norm",
        ),
    ],
)  # fmt: skip
def test_what_would_make_statistics_depend_on_the_plan_is_refused(
    training: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        job(NETWORK, **training)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (norm(0), "num_features is 0"),
        (norm(1, momentum=0.0), "momentum must be above 0"),
        (norm(1, momentum=1.5), "momentum must be above 0"),
        (norm(1, eps=0.0), "eps must be above 0"),
        (norm(1, track_running_stats=False), "has no option 'track_running_stats'"),
        (norm(1, kind="batch_norm1d"), "the input must have 2 or 3 dimensions"),
        (norm(3), "does not fit its input"),
    ],
)
def test_wrong_options_are_refused(layer: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        require_fit(blueprint_of(job([layer]), None))
