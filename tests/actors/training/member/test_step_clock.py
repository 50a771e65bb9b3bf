"""The clock of a member's step: which times count as work."""

from __future__ import annotations

import pytest

from share_compute_actors.training.member import step_clock
from share_compute_actors.training.member.step_clock import Spent, StepClock


class Time:
    """A clock that a test sets."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(step_clock, "time", time)
    return time


def test_waiting_for_samples_is_no_work(time: Time) -> None:
    clock = StepClock()
    with clock.computing():
        clock.start()
        time.now_s += 1.0
        with clock.waiting():
            time.now_s += 4.0
        time.now_s += 2.0
    time.now_s += 8.0
    assert clock.read() == Spent(15.0, 12.0)


def test_work_of_an_epoch_that_ended_does_not_count(time: Time) -> None:
    clock = StepClock()
    with clock.computing():
        clock.start()
        time.now_s += 5.0
    clock.stop()
    assert not clock.is_running
    time.now_s += 100.0
    with clock.computing():
        clock.start()
        time.now_s += 1.0
    time.now_s += 2.0
    assert clock.read() == Spent(3.0, 2.0)
    assert clock.read() == Spent(0.0, 0.0)
