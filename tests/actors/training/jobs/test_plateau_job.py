"""A learning rate that follows from validations, on real Ray nodes: equal to torch's after losses and restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_wine
from tests.actors.training.jobs.outcomes import killing, losses_of, succeeded, weights_of
from tests.actors.training.jobs.test_tasks import job, network, written
from tests.ray_nodes import Attempt
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from share_compute.lifecycle.attempt_events import AttemptEvent

pytestmark = [pytest.mark.slow, pytest.mark.exact]

RATE = 0.01
OPTIONS = {"metric": "accuracy", "factor": 0.5, "patience": 0, "threshold": 0.02, "threshold_mode": "abs"}


def rates_of(events: list[AttemptEvent]) -> dict[int, float]:
    return {event.step: event.learning_rate for event in events if event.type == "step"}


def replayed(events: list[AttemptEvent]) -> dict[int, float]:
    """Return the learning rates that torch makes of the job's validations, by step."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=RATE)
    options = {name: value for name, value in OPTIONS.items() if name != "metric"}
    peer = ReduceLROnPlateau(optimizer, mode="max", **options)  # type: ignore[arg-type]
    accuracies = {e.step: e.accuracy for e in events if e.type == "validated" and e.split == "validation"}
    rates = {}
    for step in range(1, max(rates_of(events)) + 1):
        rates[step] = optimizer.param_groups[0]["lr"]
        if step in accuracies:
            peer.step(accuracies[step] or 0.0)
    return rates


@pytest.mark.chaos
@pytest.mark.parametrize(
    "layout",
    [{"stages": 2}, pytest.param({"members_per_stage": 2}, marks=pytest.mark.thorough)],
    ids=["stages", "members"],
)
def test_lost_machines_and_resumed_jobs_have_the_same_rates_and_weights(
    layout: dict[str, int], attempt: Attempt, tmp_path: Path, nodes: list[Any]
) -> None:
    training: dict[str, Any] = {
        "steps": 300,
        "validate_every": 30,
        "checkpoint_every": 100,
        "optimizer": {"learning_rate": RATE},
        "schedule": {"name": "reduce_on_plateau", "options": OPTIONS},
    }
    data = written(tmp_path / "csv", load_wine)
    document = job(data, "tabular_classification", network(13, 3), training, **layout)
    calm = succeeded(attempt(document, folder=tmp_path / "calm"))
    assert rates_of(calm) == replayed(calm)
    assert len(set(rates_of(calm).values())) > 2
    kill, killed = killing(nodes[1], 5)
    rough = succeeded(attempt(document, folder=tmp_path / "rough", on_event=kill))
    assert killed
    checkpoint = next(e.path for e in calm if e.type == "checkpoint" and e.step == 100)
    resumed = succeeded(attempt(document, checkpoint=checkpoint, number=2, folder=tmp_path / "resumed"))
    assert losses_of(rough) == losses_of(calm)
    assert rates_of(rough) == rates_of(calm)
    assert rates_of(resumed) == {step: rate for step, rate in rates_of(calm).items() if step > 100}
    weights = weights_of(tmp_path / "calm")
    for folder in ("rough", "resumed"):
        again = weights_of(tmp_path / folder)
        assert all(torch.equal(weights[name], again[name]) for name in weights)
