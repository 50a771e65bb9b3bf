"""New interruptions of a replica, from one poll to the next."""

from __future__ import annotations

from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.deployment_status import Interruption, ServingStatus
from share_compute_api.control.deployments.interruptions import Interruptions


def status(*interruptions: Interruption, state: DeploymentState = DeploymentState.ready) -> ServingStatus:
    return ServingStatus(state=state, reason="", interruptions=interruptions)


def lost(number: int, ago_s: float = 0.0, seconds: float | None = None) -> Interruption:
    return Interruption(number=number, reason="lost birch", machines=("birch",), ago_s=ago_s, seconds=seconds)


def periods(news: list[Interruption]) -> list[tuple[int, float | None]]:
    return [(one.number, one.seconds) for one in news]


def test_a_loss_is_reported_once_and_so_is_its_end() -> None:
    seen = Interruptions()
    assert seen.news(status(), 0.0) == []
    degraded = status(lost(1), state=DeploymentState.degraded)
    assert periods(seen.news(degraded, 1.0)) == [(1, None)]
    assert seen.news(degraded, 1.5) == []
    assert periods(seen.news(status(lost(1, 1.0, 0.9)), 2.0)) == [(1, 0.9)]
    assert seen.news(status(lost(1, 1.5, 0.9)), 2.5) == []


def test_what_begins_and_ends_between_two_polls_is_reported_whole() -> None:
    seen = Interruptions()
    assert periods(seen.news(status(lost(1, 0.4, 0.2), lost(2, 0.1)), 1.0)) == [
        (1, None),
        (1, 0.2),
        (2, None),
    ]


def test_a_server_that_dies_is_an_interruption_until_the_next_one_is_ready() -> None:
    seen = Interruptions()
    assert seen.died(0.0) == []  # nothing went on before
    seen.news(status(), 1.0)
    seen.news(status(lost(1, 0.5)), 2.0)
    (died,) = seen.died(4.0)
    assert (died.number, died.machines, died.seconds) == (2, (), None)
    assert seen.died(4.5) == []  # the next one died before it was ready
    assert seen.news(status(state=DeploymentState.loading), 5.0) == []
    # The new process numbers its interruptions from 1 again; both that lasted have ended.
    ends = seen.news(status(lost(1, 0.1)), 6.0)
    assert periods(ends) == [(1, 4.5), (2, 2.0), (3, None)]
