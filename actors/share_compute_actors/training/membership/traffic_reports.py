"""Reports the bytes that members sent and received, from the counts in their heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from share_compute.lifecycle.attempt_events import LinkBytes, TrafficMeasured
from share_compute.protocol.membership import Worker
from share_compute_actors.messages import MemberStatus

_PERIOD_S = 60.0
"""Time between two reports, in seconds."""


class TrafficReports:
    """Adds up the bytes that members exchanged since the last report, and reports them about once a minute.

    Args:
        report: receives the reports.
        known: members whose bytes an earlier attempt reported. Their first heartbeat only sets the counts to subtract
            from later ones.
    """

    def __init__(self, report: Callable[[TrafficMeasured], None], known: Collection[Worker]) -> None:
        self._report = report
        self._known = set(known)
        self._seen: dict[Worker, tuple[int, int]] = {}
        """Bytes sent and received in the last heartbeat of each member."""
        self._new: dict[Worker, tuple[int, int]] = {}
        """Bytes since the last report."""
        self.sent_bytes = 0
        """Bytes that all members sent since the first observation."""
        self._reported_s = time.monotonic()

    def observe(self, heartbeats: Mapping[Worker, MemberStatus], step: int) -> None:
        """Add the counts of these heartbeats, and report if a report is due.

        Args:
            heartbeats: the last heartbeat of each member.
            step: last committed step.
        """
        for worker, heartbeat in heartbeats.items():
            self._add(worker, (heartbeat.sent_bytes, heartbeat.received_bytes))
        if time.monotonic() - self._reported_s >= _PERIOD_S:
            self.report(step)

    def report(self, step: int) -> None:
        """Report the bytes that members exchanged since the last report, if any."""
        self._reported_s = time.monotonic()
        new, self._new = self._new, {}
        if new:
            machines = {
                worker: LinkBytes(sent_bytes=sent, received_bytes=received)
                for worker, (sent, received) in sorted(new.items())
            }
            self._report(TrafficMeasured(step=step, machines=machines))

    def _add(self, worker: Worker, counts: tuple[int, int]) -> None:
        before = self._seen.get(worker, counts if worker in self._known else (0, 0))
        self._seen[worker] = counts
        if counts[0] < before[0] or counts[1] < before[1]:  # a new process counts from 0
            before = (0, 0)
        if counts != before:
            sent, received = self._new.get(worker, (0, 0))
            self.sent_bytes += counts[0] - before[0]
            self._new[worker] = sent + counts[0] - before[0], received + counts[1] - before[1]
