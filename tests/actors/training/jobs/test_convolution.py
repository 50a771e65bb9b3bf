"""Residual networks on real Ray nodes: losses as in a plain loop, the same bits in all layouts, four-dimensional
activations over compressed boundaries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from tests.actors.training.jobs.outcomes import (
    losses_of,
    require_no_change_by_a_kill,
    require_same_weights,
    succeeded,
    validated,
    weights_of,
)
from tests.ray_nodes import Attempt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from share_compute.data import StepOrder, prepare
from share_compute.models.blueprint import Blueprint, blueprint_of
from share_compute.models.factory import build_stage
from share_compute.shards import Shard
from share_compute.specification import LayerSpec, parse_job
from share_compute.specification.layers import expanded

pytestmark = [pytest.mark.slow, pytest.mark.exact]

STEPS = 8
CPU = torch.device("cpu")
RELU = {"type": "relu"}


def convolution(inputs: int, outputs: int, **options: Any) -> dict[str, Any]:
    given = {"in_channels": inputs, "out_channels": outputs, "kernel_size": 3, "padding": 1, **options}
    return {"type": "conv2d", "options": given}


def resnet(norm: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the layers of a small residual network for images of 1 x 8 x 8."""
    return [
        convolution(1, 16),
        {
            "type": "repeat",
            "times": 2,
            "layers": [{"type": "residual", "layers": [norm, RELU, convolution(16, 16)]}],
        },
        {
            "type": "residual",
            "layers": [norm, RELU, convolution(16, 32, stride=2)],
            "projection": [convolution(16, 32, kernel_size=1, padding=0, stride=2)],
        },
        RELU,
        {"type": "adaptive_avg_pool2d", "options": {"output_size": 1}},
        {"type": "flatten"},
        {"type": "linear", "options": {"in_features": 32, "out_features": 10}},
    ]


GROUP_NORM = {"type": "group_norm", "options": {"num_groups": 4, "num_channels": 16}}
BATCH_NORM = {"type": "batch_norm2d", "options": {"num_features": 16}}


class Plain(nn.Module):
    """The same network in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.bodies = nn.ModuleList(
            nn.Sequential(self.norm(), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)) for _ in range(2)
        )
        self.down = nn.Sequential(self.norm(), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1, stride=2))
        self.projection = nn.Conv2d(16, 32, 1, stride=2)
        self.last = nn.Linear(32, 10)

    def norm(self) -> nn.Module:
        return nn.GroupNorm(4, 16)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.view(-1, 1, 8, 8))
        for body in self.bodies:
            hidden = hidden + body(hidden)
        hidden = (self.down(hidden) + self.projection(hidden)).relu()
        logits: Tensor = self.last(hidden.mean((2, 3)))
        return logits


class PlainWithBatchNorm(Plain):
    """The same network with batch norm, which normalizes each microbatch alone."""

    def norm(self) -> nn.Module:
        return nn.BatchNorm2d(16, track_running_stats=False)


def job(norm: dict[str, Any], training: dict[str, Any], **parallelism: Any) -> dict[str, Any]:
    image = {"type": "unflatten", "options": {"dim": 1, "unflattened_size": [1, 8, 8]}}
    return {
        "model": {"layers": [image, *resnet(norm)]},
        "data": {"dataset": "digits", "validation_fraction": 0.2, "test_fraction": 0.2},
        "training": {
            "steps": STEPS,
            "batch_size": 32,
            "microbatches": 2,  # with more threads, the order of sums follows from the first plan
            "schedule": {"name": "constant"},
            "optimizer": {"learning_rate": 0.01},
            **training,
        },
        "parallelism": {"stages": 1, "members_per_stage": 1, **parallelism},
    }


def plain_losses(document: dict[str, Any], model: nn.Module, folder: Path) -> list[float]:
    """Train with torch alone; only the data and the initial weights are ours.

    The gradients of the microbatches are added before each update, as torch users accumulate gradients.
    """
    spec = parse_job(document)
    data = prepare(spec, folder / "data")
    blueprint = blueprint_of(spec, None, objective=data.objective, sample_shape=data.sample_shape)
    layers = len(expanded(blueprint.layers))
    start = build_stage(blueprint, Shard("m", 0, layers, layers), CPU)
    start.initialize(spec.training.seed)
    parameters = list(model.parameters())
    ours = [value for name, value in start.parameters().items() if "running" not in name]
    with torch.no_grad():
        for parameter, value in zip(parameters, ours, strict=True):
            parameter.copy_(value)
    optimizer = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0, betas=(0.9, 0.95))
    order = StepOrder(spec.training.seed, data.samples.size("train"), spec.training.batch_size)
    losses, pieces = [], spec.training.microbatches or 1
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        total = 0.0
        inputs, targets = map(torch.tensor, data.samples.take("train", order.indices(step)))
        for some, wanted in zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True):
            loss = cross_entropy(model(some), wanted) / pieces
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(total)
    return losses


LAYOUTS: list[dict[str, Any]] = [{}, {"stages": 2}, {"members_per_stage": 2}]


@pytest.mark.parametrize(
    ("norm", "plain"),
    [(GROUP_NORM, Plain), (BATCH_NORM, PlainWithBatchNorm)],
    ids=["group_norm", "batch_norm"],
)
def test_losses_of_a_residual_network_do_not_depend_on_the_layout(
    attempt: Attempt, tmp_path: Path, norm: dict[str, Any], plain: type[Plain]
) -> None:
    runs = [
        succeeded(attempt(job(norm, {}, **layout), folder=tmp_path / str(place)))
        for place, layout in enumerate(LAYOUTS)
    ]
    expected = plain_losses(job(norm, {}), plain(), tmp_path / "plain")
    for place, events in enumerate(runs):
        assert losses_of(events) == pytest.approx(expected, abs=1e-5)
        assert losses_of(events) == losses_of(runs[0])
        assert validated(events, "test") == validated(runs[0], "test")
        require_same_weights(tmp_path / "0", tmp_path / str(place))
    described = json.loads((tmp_path / "1" / "artifacts" / "model" / "layers.json").read_text())
    blueprint = Blueprint(layers=tuple(LayerSpec.model_validate(layer) for layer in described))
    rebuilt = build_stage(blueprint, Shard("m", 0, 9, 9), CPU)
    rebuilt.module.load_state_dict(weights_of(tmp_path / "1"))


@pytest.mark.chaos
@pytest.mark.parametrize(
    "layout",
    [pytest.param({"members_per_stage": 2}, marks=pytest.mark.thorough), {"stages": 2}],
    ids=["members", "stages"],
)
def test_a_kill_leaves_the_same_statistics(
    attempt: Attempt, tmp_path: Path, nodes: list[Any], layout: dict[str, int]
) -> None:
    """With one member in a stage, its weights and running statistics come from the backup of another member."""
    document = job(BATCH_NORM, {"steps": 200, "microbatches": 4, "validate_every": 50}, **layout)
    require_no_change_by_a_kill(attempt, document, tmp_path, nodes[1])
    assert any(name.endswith("running_var") for name in weights_of(tmp_path / "rough"))


def test_images_pass_compressed_boundaries(attempt: Attempt, tmp_path: Path) -> None:
    """Activations before layers 2 to 6 are [batch, channels, height, width]."""
    compression = {"boundary_compression": {"name": "fixed", "bf16": [6], "int8": [2, 3, 4, 5]}}
    runs = [
        succeeded(attempt(job(GROUP_NORM, compression, stages=stages), folder=tmp_path / str(stages)))
        for stages in (1, 2, 3)
    ]
    assert losses_of(runs[0]) == losses_of(runs[1]) == losses_of(runs[2])
    require_same_weights(tmp_path / "1", tmp_path / "2")
    require_same_weights(tmp_path / "1", tmp_path / "3")
    exact = plain_losses(job(GROUP_NORM, {}), Plain(), tmp_path / "plain")
    assert losses_of(runs[0]) != pytest.approx(exact, abs=1e-5)  # values were rounded
    assert losses_of(runs[0]) == pytest.approx(exact, abs=0.05)


def pictures(folder: Path) -> Path:
    """Write scikit-learn's digits as PNG images, with one folder for each class, and return the folder."""
    digits = load_digits()
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        place = folder / str(digit)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15).astype(np.uint8)).save(place / f"{number}.png")
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("norm", [GROUP_NORM, BATCH_NORM], ids=["group_norm", "batch_norm"])
def test_residual_networks_reach_97_percent(attempt: Attempt, tmp_path: Path, norm: dict[str, Any]) -> None:
    training = {
        "steps": 400,
        "batch_size": 64,
        "optimizer": {"name": "adam", "learning_rate": 0.003},
        "schedule": {"name": "cosine"},
    }
    document = job(norm, training, stages=2)
    head = {"type": "linear", "options": {"in_features": 512, "out_features": 10}}
    document["model"]["layers"] = [*resnet(norm)[:-3], {"type": "flatten"}, head]
    document["data"] = {
        "files": [str(pictures(tmp_path / "pictures"))],
        "images": {"height": 8, "width": 8, "channels": 1},
        "validation_fraction": 0.2,
        "test_fraction": 0.2,
    }
    assert validated(succeeded(attempt(document)), "test").accuracy >= 0.97
