"""Faults in messages between real processes: the weights stay the same, bit for bit, and recovery is quick."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.chaos.test_recovery import Calm, calm, job, train
from tests.ray_nodes import Attempt

from share_compute.errors import UserError
from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.points import Point
from share_compute_actors.testing.fault_injection import require_carried_out

pytestmark = [pytest.mark.slow, pytest.mark.chaos]
__all__ = ["calm"]

TENSOR = Point.tensor_sending
WORDS = (
    Point.report_sending,
    Point.formed_sending,
    Point.prepared_sending,
    Point.applied_sending,
    Point.halt_sending,
    Point.form_sending,
    Point.commit_sending,
    Point.proceed_sending,
)


def of_words(kind: FailureKind, duration_s: float = 0.0) -> list[InjectedFailure]:
    return [InjectedFailure(kind, point, duration_s=duration_s) for point in WORDS]


def of_tensors(kind: FailureKind, duration_s: float = 0.0) -> list[InjectedFailure]:
    """Return failures of one activation and one gradient."""
    return [
        InjectedFailure(kind, TENSOR, worker="c0", step=2, occurrence=2, duration_s=duration_s),
        InjectedFailure(kind, TENSOR, worker="c3", step=4, occurrence=3, duration_s=duration_s),
    ]


@pytest.mark.parametrize(
    ("failures", "epochs"),
    [
        pytest.param(of_tensors(FailureKind.drop), 2, id="dropped tensors"),
        pytest.param(of_tensors(FailureKind.corrupt), 2, id="damaged tensors", marks=pytest.mark.thorough),
        pytest.param(
            [*of_tensors(FailureKind.reorder), *of_tensors(FailureKind.duplicate)],
            None,
            id="out of order, twice",
            marks=pytest.mark.thorough,
        ),
        pytest.param(of_tensors(FailureKind.delay, 0.2), 0, id="late tensors", marks=pytest.mark.thorough),
        pytest.param(
            of_tensors(FailureKind.delay, 3.0),
            2,
            id="tensors that come when nobody expects them any more",
            marks=pytest.mark.thorough,
        ),
        pytest.param(of_words(FailureKind.drop), 0, id="dropped words"),
        pytest.param(of_words(FailureKind.duplicate), 0, id="words said twice", marks=pytest.mark.thorough),
        pytest.param(
            [*of_words(FailureKind.delay, 0.7), *of_words(FailureKind.reorder)],
            0,
            id="late words",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            [
                InjectedFailure(
                    FailureKind.partition,
                    TENSOR,
                    worker="c1",
                    step=3,
                    duration_s=1.0,
                    peers=frozenset({"c2"}),
                )
            ],
            None,
            id="two members that do not reach each other",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_messages_go_wrong(
    attempt: Attempt, tmp_path: Path, calm: Calm, failures: list[InjectedFailure], epochs: int | None
) -> None:
    weights, curve, events = train(attempt, tmp_path, job(2, 2), failures)
    reformed = [event for event in events if event.type == "reformed"]
    assert not any(event.lost for event in reformed)
    if epochs is not None:
        assert len(reformed) == epochs
    assert curve == calm.losses
    assert weights == calm.digest


@pytest.mark.thorough
def test_a_member_that_nobody_reaches_is_done_without(attempt: Attempt, tmp_path: Path, calm: Calm) -> None:
    failure = InjectedFailure(FailureKind.partition, Point.cell_done, worker="c1", step=3, duration_s=30.0)
    weights, curve, events = train(attempt, tmp_path, job(2, 2), [failure])
    assert [event.lost for event in events if event.type == "reformed"] == [("c1",)]
    assert curve == calm.losses
    assert weights == calm.digest


@pytest.mark.parametrize(
    "failure",
    [
        InjectedFailure(FailureKind.corrupt, Point.prepared_sending),
        InjectedFailure(FailureKind.partition, Point.planned, duration_s=1.0),
    ],
    ids=["damaged word", "coordinator cut off"],
)
def test_what_is_not_carried_out_is_refused(failure: InjectedFailure) -> None:
    with pytest.raises(UserError, match="is not carried out in real processes"):
        require_carried_out([failure])
