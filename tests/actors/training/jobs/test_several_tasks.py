"""Several tasks that share a model, on real Ray nodes: losses as in a plain loop, metrics of each, lost machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score
from tests.actors.training.jobs.outcomes import (
    losses_of,
    require_no_change_by_a_kill,
    require_same_weights,
    runs_in_layouts,
    succeeded,
    validated,
    weights_of,
)
from tests.ray_nodes import Attempt
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from share_compute.data.order import StepOrder, task_samples
from share_compute.data.several_tasks import objectives_of, prepared_tasks
from share_compute.models.blueprint import blueprint_of
from share_compute.models.factory import build_stage
from share_compute.shards import Shard
from share_compute.specification import parse_job

pytestmark = [pytest.mark.slow, pytest.mark.exact]

STEPS = 12
PIXELS = [f"pixel_{row}_{column}" for row in range(8) for column in range(8)]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a table of the digits, with whether each is odd and the sum of its pixels."""
    frame = load_digits(as_frame=True).frame
    frame["is_odd"] = np.where(frame["target"] % 2, "odd", "even")
    frame["ink"] = frame[PIXELS].sum(axis=1)
    file = tmp_path_factory.mktemp("digits") / "digits.csv"
    frame.to_csv(file, index=False)
    return file


def linear(inputs: int, outputs: int) -> dict[str, Any]:
    return {"type": "linear", "options": {"in_features": inputs, "out_features": outputs}}


def data(table: Path, target: str) -> dict[str, Any]:
    return {
        "files": [str(table)],
        "table": {"target": target, "features": PIXELS},
        "validation_fraction": 0.2,
        "test_fraction": 0.2,
    }


def tasks(table: Path) -> list[dict[str, Any]]:
    return [
        {"name": "digit", "task": "tabular_classification", "layers": [linear(32, 10)]},
        {
            "name": "parity",
            "task": "tabular_classification",
            "weight": 0.5,
            "loss": {"name": "bce"},
            "data": data(table, "is_odd"),
            "layers": [linear(32, 8), {"type": "relu"}, linear(8, 1)],
        },
        {
            "name": "ink",
            "task": "tabular_regression",
            "weight": 2.0,
            "data": data(table, "ink"),
            "layers": [linear(32, 1)],
        },
    ]


def job(table: Path, count: int, **training: Any) -> dict[str, Any]:
    return {
        "tasks": tasks(table)[:count],
        "model": {"layers": [linear(64, 32), {"type": "relu"}]},
        "data": data(table, "target"),
        "training": {
            "steps": STEPS,
            "batch_size": 16 * count,
            "microbatches": count,
            "schedule": {"name": "constant"},
            "optimizer": {"learning_rate": 0.01},
            **training,
        },
        "parallelism": {"stages": 1, "members_per_stage": 1},
    }


def plain(document: dict[str, Any], folder: Path) -> tuple[list[float], list[nn.Module], Any]:
    """Train with torch alone; only data, order and initial weights are ours. Return losses, model and data."""
    spec = parse_job(document)
    prepared = prepared_tasks(spec, folder)
    blueprint = blueprint_of(spec, None, objectives=objectives_of(spec, prepared))
    start = build_stage(blueprint, Shard("m", 0, 3, 3), torch.device("cpu"))
    start.initialize(spec.training.seed)
    trunk = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
    heads = [
        nn.Sequential(nn.Linear(32, 10)),
        nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 1)),
        nn.Sequential(nn.Linear(32, 1)),
    ][: len(prepared)]
    model = nn.ModuleList([trunk, *heads])
    model.load_state_dict(dict(zip(model.state_dict(), start.module.state_dict().values(), strict=True)))
    losses: list[Any] = [
        cross_entropy,
        lambda outputs, wanted: binary_cross_entropy_with_logits(outputs[:, 0], wanted.float()),
        lambda outputs, wanted: mse_loss(outputs[:, 0], wanted),
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, betas=(0.9, 0.95))
    count, size = spec.training.microbatches, spec.training.microbatch_size
    assert count is not None
    orders = [StepOrder(spec.training.seed, each.samples.size("train"), size) for each in prepared]
    found = []
    for step in range(1, spec.training.steps + 1):
        parts: list[Tensor] = []
        for microbatch in range(count):
            task = microbatch % len(prepared)
            chosen = task_samples(orders, count, step, microbatch)
            inputs, wanted = map(torch.tensor, prepared[task].samples.take("train", chosen))
            parts.append(spec.tasks[task].weight * losses[task](heads[task](trunk(inputs)), wanted))
        loss = torch.stack(parts).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found, [trunk, *heads], prepared


def test_losses_are_those_of_a_plain_loop_in_every_layout(
    attempt: Attempt, tmp_path: Path, table: Path
) -> None:
    document = job(table, 2, validate_every=6)
    layouts = [{}, {"members_per_stage": 2}, {"stages": 2}]
    runs = runs_in_layouts(attempt, document, tmp_path, layouts)
    expected, (trunk, *heads), prepared = plain(document, tmp_path / "plain")
    for events in runs:
        assert losses_of(events) == pytest.approx(expected, abs=1e-5)
        assert validated(events, "validation") == validated(runs[0], "validation")
    step: Any = next(event for event in runs[0] if event.type == "step")
    assert step.loss == pytest.approx((step.tasks["digit.loss"] + 0.5 * step.tasks["parity.loss"]) / 2)
    found = validated(runs[0], "test").tasks
    assert {"digit.accuracy", "digit.f1", "digit.auroc", "parity.accuracy", "parity.loss"} < found.keys()
    for name, head, own in zip(("digit", "parity"), heads, prepared, strict=True):
        inputs, wanted = own.samples.take("test", np.arange(own.samples.size("test")))
        scores = head(trunk(torch.tensor(inputs))).detach()
        guessed = scores.argmax(1) if scores.shape[1] > 1 else scores[:, 0] > 0
        assert found[f"{name}.accuracy"] == pytest.approx(accuracy_score(wanted, guessed), abs=1e-9)
    pictured = {(event.task, event.split) for event in runs[0] if event.type == "pictured"}
    assert pictured == {(task, split) for task in ("digit", "parity") for split in ("validation", "test")}
    folder = tmp_path / "2" / "artifacts" / "model"
    assert set(weights_of(tmp_path / "2")) == {
        "layers.0.weight", "layers.0.bias", "layers.2.head_digit.0.weight", "layers.2.head_digit.0.bias",
        "layers.2.head_parity.0.weight", "layers.2.head_parity.0.bias", "layers.2.head_parity.2.weight",
        "layers.2.head_parity.2.bias",
    }  # fmt: skip
    described = json.loads((folder / "tasks.json").read_text())
    assert [task["name"] for task in described] == ["digit", "parity"]
    assert described[1]["data"]["target"]["categories"] == ["even", "odd"]
    state = json.loads((folder / "training.json").read_text())
    assert state["test"]["digit.auroc"] == found["digit.auroc"]


def test_one_task_gives_the_bits_of_a_job_without_tasks(
    attempt: Attempt, tmp_path: Path, table: Path
) -> None:
    document = job(table, 1, batch_size=32, microbatches=2)
    succeeded(attempt(document, folder=tmp_path / "tasks"))
    (only,) = document.pop("tasks")
    document["model"]["layers"] += only["layers"]
    succeeded(attempt({**document, "task": only["task"]}, folder=tmp_path / "plain"))
    require_same_weights(tmp_path / "tasks", tmp_path / "plain")


@pytest.mark.chaos
def test_a_kill_leaves_the_same_weights_and_metrics(
    attempt: Attempt, tmp_path: Path, nodes: list[Any], table: Path
) -> None:
    document = job(table, 3, steps=300, batch_size=48, microbatches=6, validate_every=100)
    document["parallelism"]["members_per_stage"] = 2
    require_no_change_by_a_kill(attempt, document, tmp_path, nodes[1])


@pytest.mark.thorough
def test_the_target_of_one_task_ends_the_job(attempt: Attempt, tmp_path: Path, table: Path) -> None:
    target = {"task": "digit", "metric": "accuracy", "value": 0.9}
    document = job(table, 3, steps=2000, batch_size=96, microbatches=3, validate_every=10, target=target)
    events = succeeded(attempt(document, folder=tmp_path))
    (reached,) = (event for event in events if event.type == "target-reached")
    assert reached.metric == "digit.accuracy"
    assert reached.value == validated(events, "validation").tasks["digit.accuracy"] >= 0.9
    found = validated(events, "test").tasks
    assert found["digit.accuracy"] > 0.85
    assert found["ink.r2"] > 0.8
    assert found["ink.rmse"] > found["ink.mae"] > 1  # in the unit of the target
