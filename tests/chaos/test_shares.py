"""A member with a share of the optimizer's state dies at points of the protocol, and the weights stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.chaos.test_changes import MANY_STEPS, PAUSES, offering, reformed, slow
from tests.chaos.test_recovery import Calm, job, train
from tests.ray_nodes import Attempt

from share_compute.lifecycle.attempt_events import AttemptEvent, Reformed
from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.points import Point
from share_compute.topology import Topology

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

STEPS = 30
STEP = 22
"""Step in which a member dies: all copies of shares are complete by then."""

_calm: list[Calm] = []


@pytest.fixture
def calm(attempt: Attempt, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """Return the results of the job without shares and without failures."""
    if not _calm:
        folder = tmp_path_factory.mktemp("calm")
        weights, curve, _ = train(attempt, folder, job(2, 2, steps=STEPS))
        _calm.append(Calm(folder, weights, curve))
    return _calm[0]


@pytest.mark.parametrize(
    "point",
    [
        Point.apply_done,  # its share is updated, and the others do not have the weights
        pytest.param(Point.reduce_done, marks=pytest.mark.thorough),
        pytest.param(Point.log_received, marks=pytest.mark.thorough),
        pytest.param(Point.prepared_sending, marks=pytest.mark.thorough),
        pytest.param(Point.commit_received, marks=pytest.mark.thorough),
        pytest.param(Point.applied_sending, marks=pytest.mark.thorough),
    ],
    ids=lambda point: point.name,
)
def test_one_member_of_each_stage_is_killed(
    attempt: Attempt, tmp_path: Path, calm: Calm, point: Point
) -> None:
    document = job(2, 2, steps=STEPS)
    document["parallelism"]["optimizer"] = "sharded"
    failures = [
        # Members pause after even steps, and the step of the point is the open one.
        InjectedFailure(FailureKind.kill, point, worker="c2", step=STEP + (point is Point.applied_sending)),
        InjectedFailure(FailureKind.kill, Point.apply_done, worker="c0", step=STEP + 5),
    ]
    weights, curve, events = train(attempt, tmp_path, document, failures)
    lost = [worker for event in events if isinstance(event, Reformed) for worker in event.lost]
    assert lost == ["c2", "c0"]
    assert curve == calm.losses
    assert weights == calm.digest


@pytest.mark.thorough
def test_machines_that_come_take_shares(attempt: Attempt, topology: Topology, tmp_path: Path) -> None:
    document = job(1, 1, steps=MANY_STEPS, validate_every=None, checkpoint_every=None)
    document["parallelism"] = {"stages": 1, "optimizer": "sharded"}
    machines = slow(topology, 1)
    calm_weights, calm_curve, _ = train(attempt, tmp_path / "calm", document, machines=machines)

    weights, curve, events = train(
        attempt,
        tmp_path / "joined",
        document,
        PAUSES,
        on_event=offering(topology),
        machines=machines,
        drift=1e6,
    )
    first = next(change for change in reformed(events) if change.joined)
    assert len(first.plan.stages[0].members) > 1
    assert curve == calm_curve
    assert weights == calm_weights


def test_a_machine_that_leaves_hands_its_share_over(
    attempt: Attempt, topology: Topology, tmp_path: Path
) -> None:
    document = job(1, 3, steps=STEPS)
    document["parallelism"]["optimizer"] = "sharded"
    machines = Topology(topology.contributors[:3])
    calm_weights, calm_curve, _ = train(attempt, tmp_path / "calm", document, machines=machines)

    def leave(event: AttemptEvent, coordinator: Any) -> None:
        if event.type == "started":
            coordinator.drain.remote("c1")

    weights, curve, events = train(attempt, tmp_path / "left", document, on_event=leave, machines=machines)
    (change,) = reformed(events)
    assert (change.left, change.lost) == (("c1",), ())
    assert curve == calm_curve
    assert weights == calm_weights
