"""A process that receives no calls ends itself; one that receives calls does not."""

from __future__ import annotations

import threading

from tests.conftest import wait_for

from share_compute_actors.group.lifeline import Lifeline


class Clock:
    """A clock that a test sets, and that counts how often it is read."""

    def __init__(self) -> None:
        self.now_s, self.num_calls = 0.0, 0

    def __call__(self) -> float:
        self.num_calls += 1
        return self.now_s


def test_without_questions() -> None:
    ended = threading.Event()
    Lifeline(0.01, ended.set)
    assert ended.wait(60.0)


def test_with_a_question() -> None:
    ended, clock = threading.Event(), Clock()
    line = Lifeline(0.01, ended.set, clock)
    for _ in range(20):
        clock.now_s += 0.009
        line.pull()
        before = clock.num_calls
        wait_for(lambda: clock.num_calls >= before + 3, "a check of the time")  # noqa: B023 - used at once
        assert not ended.is_set()
    clock.now_s += 0.011
    assert ended.wait(60.0)
