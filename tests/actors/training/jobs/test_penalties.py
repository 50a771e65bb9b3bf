"""Random changes of samples, and the L1 penalty, on real Ray nodes: the same bits on every layout."""

from __future__ import annotations

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
    runs_in_layouts,
)
from tests.actors.training.jobs.test_tasks import job
from tests.ray_nodes import Attempt
from torch import nn
from torch.nn.functional import cross_entropy

from share_compute.data import StepOrder, prepare
from share_compute.models.blueprint import blueprint_of
from share_compute.models.factory import build_stage
from share_compute.shards import Shard
from share_compute.specification import parse_job

pytestmark = [pytest.mark.slow, pytest.mark.exact]

STEPS = 8
L1 = 0.002


def document(folder: Path, **parallelism: Any) -> dict[str, Any]:
    layers: list[dict[str, Any]] = [
        {"type": "conv2d", "options": {"in_channels": 1, "out_channels": 4, "kernel_size": 3}},
        {"type": "relu"},
        {"type": "flatten"},
        {"type": "linear", "options": {"in_features": 100, "out_features": 10}},
    ]
    training = {
        "steps": STEPS,
        "microbatches": 2,  # with more threads, the order of sums follows from the first plan
        "optimizer": {"learning_rate": 0.01, "l1": L1, "name": "adam"},
    }
    made = job(folder, "image_classification", layers, training, **parallelism)
    made["data"] |= {
        "files": [str(folder / "pictures")],
        "table": None,
        "images": {"height": 8, "width": 8, "channels": 1},
        "transforms": {"crop": {"height": 7, "width": 7, "padding": 1}, "flip": 0.5, "noise": 0.1},
    }
    return made


def plain_losses(made: dict[str, Any], folder: Path) -> list[float]:
    """Train with torch alone, whole batches at a time; only the data and the initial weights are ours."""
    spec = parse_job(made)
    data = prepare(spec, folder)
    blueprint = blueprint_of(spec, None, objective=data.objective, sample_shape=data.sample_shape)
    start = build_stage(blueprint, Shard("m", 0, 4, 4), torch.device("cpu"))
    start.initialize(spec.training.seed)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(100, 10))
    model.load_state_dict(dict(zip(model.state_dict(), start.persistent().values(), strict=True)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.95))
    order = StepOrder(spec.training.seed, data.samples.size("train"), spec.training.batch_size)
    losses = []
    for step in range(1, STEPS + 1):
        inputs, targets = map(torch.tensor, data.take("train", order.indices(step), step))
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for weight in model.parameters():
            if weight.dim() > 1:
                assert weight.grad is not None
                weight.grad += L1 * weight.detach().sign()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Folder with a folder of pictures of digits."""
    digits = load_digits()
    for number in range(200):
        place = tmp_path / "pictures" / str(digits.target[number])
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[number] * 15).astype(np.uint8)).save(place / f"{number}.png")
    return tmp_path


def test_changes_and_penalties_do_not_depend_on_the_layout(attempt: Attempt, pictures: Path) -> None:
    layouts: list[dict[str, Any]] = [{}, {"members_per_stage": 2}, {"stages": 2}]
    made = document(pictures)
    runs = runs_in_layouts(attempt, made, pictures, layouts)
    assert losses_of(runs[0]) == pytest.approx(plain_losses(made, pictures / "plain"), abs=1e-5)


@pytest.mark.chaos
@pytest.mark.thorough
def test_a_kill_leaves_the_same_weights(attempt: Attempt, pictures: Path, nodes: list[Any]) -> None:
    made = document(pictures, stages=2)
    made["training"] |= {"steps": 300}
    require_no_change_by_a_kill(attempt, made, pictures, nodes[1])
