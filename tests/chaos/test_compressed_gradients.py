"""Compressed sums of gradients have the same bits whatever is lost, and on any machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.chaos.test_recovery import Calm, job, train
from tests.ray_nodes import Attempt

from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.points import Point
from share_compute.topology import Topology

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

INT8 = {"name": "int8", "error_feedback": None}

_calm: list[Calm] = []


def compressed(stages: int, members: int, *, steps: int = 20, **training: Any) -> dict[str, Any]:
    return job(stages, members, steps=steps, **{"compression": INT8, "checkpoint_every": 10, **training})


@pytest.fixture
def calm(attempt: Attempt, topology: Topology, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """Return the results of one stage of two members without losses; its runs have four microbatches each."""
    if not _calm:
        folder = tmp_path_factory.mktemp("calm")
        machines = Topology(topology.contributors[:2])
        weights, curve, _ = train(attempt, folder, compressed(1, 2), machines=machines)
        _calm.append(Calm(folder, weights, curve))
    return _calm[0]


def test_the_loss_is_close_to_that_without_compression(
    attempt: Attempt, topology: Topology, tmp_path: Path, calm: Calm
) -> None:
    machines = Topology(topology.contributors[:2])
    plain = compressed(1, 2, compression={"name": "none"})
    weights, curve, _ = train(attempt, tmp_path, plain, machines=machines)
    assert weights != calm.digest
    for (step, loss), (_, compact) in zip(curve, calm.losses, strict=True):
        assert compact == pytest.approx(loss, rel=0.01), f"step {step}"


@pytest.mark.parametrize("members", [1, 3])
def test_another_number_of_members_continues_with_the_same_bits(
    attempt: Attempt, topology: Topology, tmp_path: Path, calm: Calm, members: int
) -> None:
    """Three members do not divide the two runs evenly, so they send parts of runs to each other."""
    weights, curve, _ = train(
        attempt,
        tmp_path,
        compressed(1, members),
        checkpoint=calm.folder / "checkpoints" / "step-00000010",
        known=10,
        machines=Topology(topology.contributors[:members]),
    )
    assert curve == calm.losses[10:]
    assert weights == calm.digest


def test_another_number_of_stages_continues_with_the_same_bits(
    attempt: Attempt, topology: Topology, tmp_path: Path, calm: Calm
) -> None:
    for stages, members in ((2, 2), (3, 1)):
        weights, _, _ = train(
            attempt,
            tmp_path / str(stages),
            compressed(stages, members),
            checkpoint=calm.folder / "checkpoints" / "step-00000010",
            known=10,
            machines=Topology(topology.contributors[: stages * members]),
        )
        assert weights == calm.digest


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Point.cell_done, Point.reduce_done),
        pytest.param(Point.reduce_starting, Point.prepared_sending, marks=pytest.mark.thorough),
        pytest.param(Point.commit_received, Point.cell_starting, marks=pytest.mark.thorough),
    ],
    ids=lambda point: point.name,
)
def test_members_of_both_stages_are_killed(
    attempt: Attempt, tmp_path: Path, first: Point, second: Point
) -> None:
    document = compressed(2, 2, steps=5, boundary_compression={"name": "int8"})
    calm_weights, calm_curve, _ = train(attempt, tmp_path / "calm", document)
    failures = [
        InjectedFailure(FailureKind.kill, first, worker="c2", step=3),
        InjectedFailure(FailureKind.kill, second, worker="c0", step=4),
    ]
    weights, curve, events = train(attempt, tmp_path / "lost", document, failures)
    reformed = [event for event in events if event.type == "reformed"]
    assert {worker for event in reformed for worker in event.lost} == {"c0", "c2"}
    assert curve == calm_curve
    assert weights == calm_weights


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["bf16", "int4", "int2", "sign", "topk"])
def test_every_codec_trains(attempt: Attempt, topology: Topology, tmp_path: Path, name: str) -> None:
    codec = {"name": name, "error_feedback": None}
    machines = Topology(topology.contributors[:2])
    _, curve, _ = train(attempt, tmp_path, compressed(1, 2, steps=3, compression=codec), machines=machines)
    assert len(curve) == 3
