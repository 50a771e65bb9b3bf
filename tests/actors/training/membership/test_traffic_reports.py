"""Bytes that members exchanged, added up from the counts in their heartbeats."""

from __future__ import annotations

import pytest

from share_compute.lifecycle.attempt_events import TrafficMeasured
from share_compute_actors.messages import MemberStatus
from share_compute_actors.training.membership import traffic_reports
from share_compute_actors.training.membership.traffic_reports import TrafficReports


def heartbeats(**counts: tuple[int, int]) -> dict[str, MemberStatus]:
    return {
        worker: MemberStatus(
            worker, step=0, resident_bytes=0, peak_resident_bytes=0, sent_bytes=sent, received_bytes=received
        )
        for worker, (sent, received) in counts.items()
    }


def reported(events: list[TrafficMeasured]) -> list[dict[str, tuple[int, int]]]:
    return [
        {worker: (link.sent_bytes, link.received_bytes) for worker, link in event.machines.items()}
        for event in events
    ]


def test_each_byte_is_reported_once() -> None:
    events: list[TrafficMeasured] = []
    reports = TrafficReports(events.append, ())
    reports.observe(heartbeats(ada=(10, 0), bob=(0, 10)), 1)
    reports.observe(heartbeats(ada=(15, 5), bob=(0, 10)), 2)
    assert events == []
    reports.report(2)
    reports.report(2)
    reports.observe(heartbeats(ada=(16, 5)), 3)
    reports.report(3)
    assert reported(events) == [{"ada": (15, 5), "bob": (0, 10)}, {"ada": (1, 0)}]
    assert [event.step for event in events] == [2, 3]


def test_a_new_process_of_a_machine_counts_from_zero() -> None:
    events: list[TrafficMeasured] = []
    reports = TrafficReports(events.append, ())
    reports.observe(heartbeats(ada=(100, 50)), 1)
    reports.observe({}, 1)
    reports.observe(heartbeats(ada=(7, 60)), 2)
    reports.report(2)
    assert reported(events) == [{"ada": (107, 110)}]


def test_what_an_earlier_attempt_reported_is_not_reported_again() -> None:
    events: list[TrafficMeasured] = []
    reports = TrafficReports(events.append, {"ada"})
    reports.observe(heartbeats(ada=(100, 50), bob=(1, 1)), 1)
    reports.observe(heartbeats(ada=(110, 50), bob=(1, 1)), 1)
    reports.report(1)
    assert reported(events) == [{"ada": (10, 0), "bob": (1, 1)}]


def test_reports_are_made_once_in_a_period(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[TrafficMeasured] = []
    clock = iter([0.0, 59.0, 61.0, 61.0, 62.0])
    monkeypatch.setattr(traffic_reports.time, "monotonic", lambda: next(clock))
    reports = TrafficReports(events.append, ())
    for step, sent in enumerate((10, 20, 30), start=1):
        reports.observe(heartbeats(ada=(sent, 0)), step)
    assert reported(events) == [{"ada": (20, 0)}]
