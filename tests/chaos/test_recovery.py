"""Processes are killed at all points of the protocol: the weights stay the same, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.ray_nodes import Attempt

from share_compute.lifecycle.attempt_events import AttemptEvent
from share_compute.models.storage.weights import WeightFolder
from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.points import Point

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

STEPS = 5
MEMBER_POINTS = [
    point
    for point in Point
    if point.role == "member"
    # These points are only passed after another failure, or with a backup.
    and point not in {Point.reduce_failed, Point.broken_sending, Point.log_sending, Point.log_received}
]

FORMING = {
    Point.halt_received,
    Point.report_sending,
    Point.weights_loaded,
    Point.form_received,
    Point.formed_sending,
}

PAUSING = {Point.applied_sending, Point.proceed_received}


def job(stages: int, members: int, **training: Any) -> dict[str, Any]:
    layers = [
        {"type": "linear", "options": {"in_features": 64, "out_features": 48}},
        {"type": "dropout", "options": {"p": 0.1}},
        {"type": "relu"},
        {"type": "linear", "options": {"in_features": 48, "out_features": 48}},
        {"type": "layer_norm", "options": {"normalized_shape": 48}},
        {"type": "linear", "options": {"in_features": 48, "out_features": 10}},
    ]
    return {
        "model": {"layers": layers},
        "data": {"dataset": "digits"},
        "training": {
            "steps": STEPS,
            "batch_size": 64,
            "microbatches": 8,
            "validate_every": 2,
            "checkpoint_every": 2,
            **training,
        },
        "parallelism": {"stages": stages, "members_per_stage": members, "strategy": "uniform"},
    }


def digest(folder: Path) -> str:
    """Return the SHA-256 of all weights of a finished job, by name."""
    return WeightFolder(folder / "artifacts" / "model").digest()


def losses(events: Sequence[AttemptEvent]) -> list[tuple[int, float]]:
    return [(event.step, event.loss) for event in events if event.type == "step"]


def train(
    attempt: Attempt,
    folder: Path,
    document: dict[str, Any],
    failures: Sequence[InjectedFailure] = (),
    **options: Any,
) -> tuple[str, list[tuple[int, float]], list[AttemptEvent]]:
    folder.mkdir(exist_ok=True)
    events = attempt(document, folder=folder, failures=failures, **options)
    assert events[-1].outcome == "succeeded", events[-1].reason
    return digest(folder), losses(events), events


class Calm(NamedTuple):
    """Results of the job without failures."""

    folder: Path
    digest: str
    losses: list[tuple[int, float]]


_calm: list[Calm] = []


@pytest.fixture
def calm(attempt: Attempt, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    if not _calm:
        folder = tmp_path_factory.mktemp("calm")
        weights, curve, _ = train(attempt, folder, job(2, 2))
        _calm.append(Calm(folder, weights, curve))
    return _calm[0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(
            *pair,
            marks=pytest.mark.thorough if number % 6 else pytest.mark.real_path if number == 0 else (),
        )
        for number, pair in enumerate(
            zip_longest(MEMBER_POINTS[::2], MEMBER_POINTS[1::2], fillvalue=Point.cell_done)
        )
    ],
    ids=lambda point: point.name,
)
def test_members_killed_at_any_point(
    attempt: Attempt, tmp_path: Path, calm: Calm, first: Point, second: Point
) -> None:
    """One member of each stage is killed: two points are tested with one start."""
    failures = [
        InjectedFailure(FailureKind.kill, point, worker=worker, step=1 if point in FORMING else step)
        # Members pause after steps 2 and 4.
        for point, worker, step in ((first, "c2", 3), (second, "c0", 5 if second in PAUSING else 4))
    ]
    weights, curve, events = train(attempt, tmp_path, job(2, 2), failures)
    notes = [event.message for event in events if event.type == "note"]
    for name in ("machine-2", "machine-0"):
        assert any(note.startswith(f"lost machine {name}") for note in notes), f"{name} did not die"
    assert curve == calm.losses
    assert weights == calm.digest


def test_what_is_reported_of_two_deaths(attempt: Attempt, tmp_path: Path, calm: Calm) -> None:
    failures = [
        InjectedFailure(FailureKind.kill, Point.cell_done, worker="c0", step=2),
        InjectedFailure(FailureKind.kill, Point.cell_starting, worker="c3", step=4),
    ]
    weights, curve, events = train(attempt, tmp_path, job(2, 2), failures)
    reformed = [event for event in events if event.type == "reformed"]
    assert {worker for event in reformed for worker in event.lost} == {"c0", "c3"}
    assert [len(stage.members) for stage in reformed[-1].plan.stages] == [1, 1]
    assert curve == calm.losses
    assert weights == calm.digest


def test_when_all_are_dead_the_attempt_ends_and_says_who(attempt: Attempt, tmp_path: Path) -> None:
    failure = InjectedFailure(FailureKind.kill, Point.cell_starting, step=3)
    events = attempt(job(1, 1), folder=tmp_path, failures=[failure])
    assert events[-1].outcome == "failed"
    assert events[-1].error["code"] == "contributor-lost"
    assert events[-1].reason == "machines were lost: machine-0"


@pytest.mark.thorough
def test_members_that_die_one_after_the_other(attempt: Attempt, tmp_path: Path, calm: Calm) -> None:
    failures = [
        InjectedFailure(FailureKind.kill, Point.cell_done, worker="c1", step=3),
        InjectedFailure(FailureKind.kill, Point.report_sending, worker="c3", step=3),
    ]
    weights, curve, _ = train(attempt, tmp_path, job(2, 2), failures)
    assert curve == calm.losses
    assert weights == calm.digest


def test_an_unresponsive_member_is_left_out(attempt: Attempt, tmp_path: Path, calm: Calm) -> None:
    failure = InjectedFailure(FailureKind.stop, Point.cell_starting, worker="c2", step=3, duration_s=60.0)
    weights, curve, events = train(attempt, tmp_path, job(2, 2), [failure])
    assert [event.lost for event in events if event.type == "reformed"] == [("c2",)]
    assert curve == calm.losses
    assert weights == calm.digest


@pytest.mark.parametrize(
    ("stages", "members"),
    [pytest.param(1, 1, marks=pytest.mark.thorough), pytest.param(1, 3, marks=pytest.mark.thorough), (4, 1)],
)
def test_a_job_goes_on_with_other_stages_from_a_checkpoint(
    attempt: Attempt, tmp_path: Path, calm: Calm, stages: int, members: int
) -> None:
    checkpoint = calm.folder / "checkpoints" / "step-00000002"
    weights, curve, _ = train(attempt, tmp_path, job(stages, members), checkpoint=checkpoint, number=2)
    assert curve == calm.losses[2:]
    assert weights == calm.digest


def test_a_machine_leaves_and_nothing_is_done_twice(attempt: Attempt, tmp_path: Path, calm: Calm) -> None:
    def leave(event: AttemptEvent, coordinator: Any) -> None:
        if event.type == "started":
            coordinator.drain.remote("c1")

    weights, curve, events = train(attempt, tmp_path, job(2, 2), on_event=leave)
    reformed = [event for event in events if event.type == "reformed"]
    assert [(event.left, event.lost, event.recomputed) for event in reformed] == [(("c1",), (), 0)]
    assert curve == calm.losses
    assert weights == calm.digest
