"""Tasks on users' own tables, on real Ray nodes: losses as in a plain loop, metrics, the target, lost machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.linear_model import Ridge
from tests.actors.training.jobs.outcomes import (
    losses_of,
    require_no_change_by_a_kill,
    succeeded,
    validated,
    weights_of,
)
from tests.ray_nodes import Attempt
from torch import nn
from torch.nn.functional import cross_entropy

from share_compute.data import StepOrder, prepare
from share_compute.lifecycle.attempt_events import AttemptEvent
from share_compute.models.blueprint import blueprint_of
from share_compute.models.factory import build_stage
from share_compute.shards import Shard
from share_compute.specification import parse_job

pytestmark = [pytest.mark.slow, pytest.mark.exact]

STEPS = 12


def written(folder: Path, load: Any) -> Path:
    """Write a data set of scikit-learn as two .csv files into a folder, and return the folder."""
    folder.mkdir()
    table = load(as_frame=True).frame
    half = len(table) // 2
    table[:half].to_csv(folder / "1.csv", index=False)
    table[half:].to_csv(folder / "2.csv", index=False)
    return folder


def network(inputs: int, outputs: int, width: int = 32) -> list[dict[str, Any]]:
    return [
        {"type": "linear", "options": {"in_features": inputs, "out_features": width}},
        {"type": "relu"},
        {"type": "linear", "options": {"in_features": width, "out_features": outputs}},
    ]


def job(
    folder: Path,
    task: str,
    layers: list[dict[str, Any]],
    training: dict[str, Any],
    data: dict[str, Any] | None = None,
    **parallelism: Any,
) -> dict[str, Any]:
    return {
        "task": task,
        "model": {"layers": layers},
        "data": {
            "files": [str(folder / "1.csv"), str(folder / "2.csv")],
            "table": {"target": "target"},
            "validation_fraction": 0.2,
            "test_fraction": 0.2,
            **(data or {}),
        },
        "training": {"batch_size": 32, "microbatches": 4, "schedule": {"name": "constant"}, **training},
        "parallelism": {"stages": 1, "members_per_stage": 1, **parallelism},
    }


def ending(events: list[AttemptEvent]) -> Any:
    return events[-1]


def pictured(events: list[AttemptEvent]) -> list[Any]:
    return [event for event in events if event.type == "pictured"]


def plain_losses(document: dict[str, Any], folder: Path) -> list[float]:
    """Train with torch alone, whole batches at a time; only the data and the initial weights are ours."""
    spec = parse_job(document)
    data = prepare(spec, folder / "data")
    blueprint = blueprint_of(spec, None, objective=data.objective, sample_shape=data.sample_shape)
    start = build_stage(blueprint, Shard("m", 0, 3, 3), torch.device("cpu"))
    start.initialize(spec.training.seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model.load_state_dict(dict(zip(model.state_dict(), start.module.state_dict().values(), strict=True)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, betas=(0.9, 0.95))
    order = StepOrder(spec.training.seed, data.samples.size("train"), spec.training.batch_size)
    losses = []
    for step in range(1, STEPS + 1):
        inputs, targets = map(torch.tensor, data.samples.take("train", order.indices(step)))
        loss = cross_entropy(model(inputs), targets, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def digits(folder: Path, **parallelism: Any) -> dict[str, Any]:
    training = {
        "steps": STEPS,
        "microbatches": 2,  # with more threads, the order of sums follows from the first plan
        "validate_every": 6,
        "loss": {"label_smoothing": 0.1},
        "optimizer": {"learning_rate": 0.01},
    }
    return job(folder, "tabular_classification", network(64, 10), training, **parallelism)


def test_losses_and_metrics_do_not_depend_on_the_layout(attempt: Attempt, tmp_path: Path) -> None:
    data = written(tmp_path / "csv", load_digits)
    layouts = [{}, {"stages": 2}, {"members_per_stage": 2}]
    runs = [
        succeeded(attempt(digits(data, **layout), folder=tmp_path / str(place)))
        for place, layout in enumerate(layouts)
    ]
    expected = plain_losses(digits(data), tmp_path / "plain")
    for events in runs:
        assert losses_of(events) == pytest.approx(expected, abs=1e-5)
        assert losses_of(events) == losses_of(runs[0])
        for split in ("validation", "test"):
            assert validated(events, split) == validated(runs[0], split)
        assert pictured(events) == pictured(runs[0])
    assert pictured(runs[0])[-1].classes == tuple("0123456789")
    matrix = np.array(pictured(runs[0])[-1].confusion)
    assert np.trace(matrix) / matrix.sum() == pytest.approx(validated(runs[0], "test").accuracy)
    assert validated(runs[0], "test").top_5_accuracy > validated(runs[0], "test").accuracy > 0.5
    first = weights_of(tmp_path / "0")
    for place in (1, 2):
        weights = weights_of(tmp_path / str(place))
        assert weights.keys() == first.keys() != set()
        assert all(torch.equal(first[name], each) for name, each in weights.items())
    state = json.loads((tmp_path / "2" / "artifacts" / "model" / "training.json").read_text())
    assert state["test"]["auroc"] == validated(runs[0], "test").auroc
    description = json.loads((tmp_path / "2" / "artifacts" / "model" / "data.json").read_text())
    assert description["target"]["categories"] == [str(digit) for digit in range(10)]


@pytest.mark.chaos
def test_a_kill_leaves_the_same_weights_and_metrics(
    attempt: Attempt, tmp_path: Path, nodes: list[Any]
) -> None:
    data = written(tmp_path / "csv", load_wine)
    training = {"steps": 300, "validate_every": 100, "loss": {"class_weights": "balanced", "name": "hinge"}}
    document = job(data, "tabular_classification", network(13, 3), training, members_per_stage=2)
    require_no_change_by_a_kill(attempt, document, tmp_path, nodes[1])


@pytest.mark.thorough
def test_digits_reach_97_percent(attempt: Attempt, tmp_path: Path) -> None:
    data = written(tmp_path / "csv", load_digits)
    training = {"steps": 300, "batch_size": 64, "optimizer": {"learning_rate": 0.005}}
    document = job(data, "tabular_classification", network(64, 10, 128), training, stages=2)
    assert validated(succeeded(attempt(document)), "test").accuracy >= 0.97


@pytest.mark.thorough
def test_pictures_reach_97_percent(attempt: Attempt, tmp_path: Path) -> None:
    digits = load_digits()
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        place = tmp_path / "pictures" / str(digit)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15).astype(np.uint8)).save(place / f"{number}.png")
    layers: list[dict[str, Any]] = [
        {"type": "conv2d", "options": {"in_channels": 1, "out_channels": 16, "kernel_size": 3, "padding": 1}},
        {"type": "relu"},
        {"type": "flatten"},
        {"type": "linear", "options": {"in_features": 1024, "out_features": 10}},
    ]
    training = {"steps": 300, "batch_size": 64, "optimizer": {"name": "adam", "learning_rate": 0.003}}
    document = job(tmp_path, "image_classification", layers, training, stages=2)
    document["data"] |= {
        "files": [str(tmp_path / "pictures")],
        "table": None,
        "images": {"height": 8, "width": 8, "channels": 1},
    }
    assert validated(succeeded(attempt(document)), "test").accuracy >= 0.97


@pytest.mark.thorough
def test_the_target_ends_the_job(attempt: Attempt, tmp_path: Path) -> None:
    data = written(tmp_path / "csv", load_breast_cancer)
    training = {
        "steps": 2000,
        "validate_every": 10,
        "loss": {"name": "bce"},
        "target": {"metric": "accuracy", "value": 0.96},
        "optimizer": {"learning_rate": 0.01, "weight_decay": 0.01},
    }
    document = job(data, "tabular_classification", network(30, 1), training, members_per_stage=2)
    events = succeeded(attempt(document))
    (reached,) = (event for event in events if event.type == "target-reached")
    assert reached.value == validated(events, "validation").accuracy >= 0.96
    assert reached.step == len(losses_of(events)) < 500
    assert reached.seconds > 0
    assert reached.sent_bytes > 0
    assert f"accuracy {reached.value:.4f} reached the target 0.96" in ending(events).reason
    assert validated(events, "test").accuracy >= 0.96
    assert validated(events, "test").auroc >= 0.98


@pytest.mark.thorough
def test_the_target_ends_a_job_with_rounds(attempt: Attempt, tmp_path: Path) -> None:
    data = written(tmp_path / "csv", load_wine)
    training = {
        "steps": 40,
        "validate_every": 4,
        "synchronization": {"kind": "local", "branches": 2, "every": 4},
        "target": {"metric": "validation_loss", "value": 100.0},
    }
    events = succeeded(attempt(job(data, "tabular_classification", network(13, 3), training)))
    (reached,) = (event for event in events if event.type == "target-reached")
    assert reached.step == validated(events, "validation").step == 4


@pytest.mark.thorough
def test_diabetes_is_predicted_as_well_as_by_ridge(attempt: Attempt, tmp_path: Path) -> None:
    data = written(tmp_path / "csv", load_diabetes)
    layers = [{"type": "linear", "options": {"in_features": 10, "out_features": 1}}]
    training = {"steps": 600, "batch_size": 64, "optimizer": {"name": "adam", "learning_rate": 0.01}}
    document = job(data, "tabular_regression", layers, training, {"validation_fraction": 0})
    events = succeeded(attempt(document))
    samples = prepare(parse_job(document), tmp_path / "plain").samples
    (inputs, targets), (others, truth) = (
        samples.take(split, np.arange(samples.size(split))) for split in ("train", "test")
    )
    ridge = Ridge().fit(inputs, targets)
    found = validated(events, "test")
    assert found.r2 == pytest.approx(ridge.score(others, truth), abs=0.01)
    assert found.rmse > found.mae > 30  # in the unit of the target
    assert found.r2 > 0.3


@pytest.mark.thorough
def test_wine_is_told_apart_also_with_categories(attempt: Attempt, tmp_path: Path) -> None:
    table = load_wine(as_frame=True).frame
    table["strength"] = np.where(table["alcohol"] > 13, "strong", "light")
    table["target"] = table["target"].map({0: "barolo", 1: "grignolino", 2: "barbera"})
    table.drop(columns="alcohol").to_parquet(tmp_path / "wine.parquet")
    training = {"steps": 150, "optimizer": {"learning_rate": 0.01}, "loss": {"class_weights": "balanced"}}
    document = job(tmp_path, "tabular_classification", network(14, 3), training, stages=2)
    document["data"] |= {
        "files": [str(tmp_path / "wine.parquet")],
        "table": {"target": "target", "categorical": ["strength"]},
    }
    found = validated(succeeded(attempt(document)), "test")
    assert found.accuracy >= 0.94
    assert found.f1 >= 0.94
