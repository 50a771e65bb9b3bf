"""Code that training and inference share to supervise members: backoff, events, the compute thread."""

from __future__ import annotations

import threading

import pytest

from share_compute_actors.group.backoff import Backoff
from share_compute_actors.group.compute_thread import ComputeThread
from share_compute_actors.group.event_feed import EventFeed


class Clock:
    """A clock that a test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_machine_whose_members_die_soon_is_left_alone_longer_each_time() -> None:
    clock = Clock()
    backoff = Backoff(5.0, 600.0, 30.0, clock)
    for rest_s in (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0):
        backoff.joined(["a"])
        clock.now_s += 1.0
        assert "a" not in backoff
        backoff.lost("a")
        clock.now_s += rest_s - 0.1
        assert "a" in backoff
        clock.now_s += 0.2
        assert "a" not in backoff
    backoff.joined(["a"])
    clock.now_s += 3600.0
    backoff.lost("a")
    clock.now_s += 5.1
    assert "a" not in backoff
    assert "b" not in backoff


def test_who_stays_a_member_over_many_epochs_has_been_one_since_the_first() -> None:
    clock = Clock()
    backoff = Backoff(5.0, 600.0, 30.0, clock)
    for _ in range(10):
        backoff.joined(["a"])
        clock.now_s += 10.0
    backoff.lost("a")
    clock.now_s += 5.1
    assert "a" not in backoff


def test_all_machines_in_their_backoff_are_known() -> None:
    clock = Clock()
    backoff = Backoff(2.0, 300.0, 300.0, clock)
    backoff.lost("a")
    clock.now_s += 1.0
    backoff.lost("b")
    backoff.lost("b")
    assert backoff.paused == {"a", "b"}
    clock.now_s += 1.5
    assert backoff.paused == {"b"}
    clock.now_s += 3.0
    assert backoff.paused == frozenset()


def test_a_member_that_never_joined_counts_as_lost_soon() -> None:
    clock = Clock()
    backoff = Backoff(2.0, 300.0, 300.0, clock)
    backoff.lost("a")
    clock.now_s += 1000.0
    backoff.lost("a")
    clock.now_s += 3.9
    assert "a" in backoff


def test_events_are_given_until_the_listener_has_them() -> None:
    feed: EventFeed[str] = EventFeed()
    assert feed.pull(0, 0.0) == []
    feed.put(["a", "b"])
    assert feed.pull(0, 0.0) == ["a", "b"]
    assert feed.pull(1, 0.0) == ["b"]
    feed.put(["c"])
    assert feed.pull(2, 0.0) == ["c"]
    assert feed.pull(3, 0.0) == []


def test_an_event_ends_the_wait_of_the_listener() -> None:
    feed: EventFeed[str] = EventFeed()
    threading.Timer(0.1, feed.put, [["a"]]).start()
    assert feed.pull(0, 60.0) == ["a"]


class Idle(ComputeThread):
    """A compute thread that only runs submitted functions."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        super().__init__(self.failures.append)
        self._start()

    def _loop(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._orders)
                order = self._next_order()
            if order is not None:
                self._run_order(order)


def test_orders_run_on_the_compute_thread_and_their_errors_come_back() -> None:
    thread = Idle()
    assert thread.order(lambda: threading.current_thread().name) == "compute"
    with pytest.raises(ZeroDivisionError):
        thread.order(lambda: 1 / 0)
    assert [type(each) for each in thread.failures] == [ZeroDivisionError]
    assert thread.order(lambda: 7) == 7
