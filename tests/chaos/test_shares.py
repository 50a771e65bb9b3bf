"""A member with a share of the optimizer's state dies at points of the protocol, and the weights stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.chaos.test_recovery import Calm, job, train
from tests.ray_nodes import Attempt

from share_compute.lifecycle.attempt_events import Reformed
from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.points import Point

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
        InjectedFailure(FailureKind.kill, point, worker="c2", step=STEP),
        InjectedFailure(FailureKind.kill, Point.apply_done, worker="c0", step=STEP + 5),
    ]
    weights, curve, events = train(attempt, tmp_path, document, failures)
    lost = [worker for event in events if isinstance(event, Reformed) for worker in event.lost]
    assert lost == ["c2", "c0"]
    assert curve == calm.losses
    assert weights == calm.digest
