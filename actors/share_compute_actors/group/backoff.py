"""Exponential backoff for machines on which members were lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from share_compute.backoff import backoff_s
from share_compute.protocol.membership import Worker


class Backoff:
    """Records a pause for each machine on which a member was lost.

    No member should be started on the machine during the pause.

    The pause doubles with each further loss, unless the lost member had joined at least ``lasting_s`` before.

    Args:
        first_s: the first pause, in seconds.
        longest_s: the longest pause, in seconds.
        lasting_s: time in seconds. If a member is lost this long after it joined, or later, the pause is ``first_s``.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        first_s: float,
        longest_s: float,
        lasting_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._lasting_s = lasting_s
        self._clock = clock
        self._since: dict[Worker, float] = {}
        """Time when each member joined, by member."""
        self._pauses: dict[Worker, tuple[int, float]] = {}
        """Number of doublings of each machine's last pause, and the time when the pause ends."""

    def joined(self, workers: Iterable[Worker]) -> None:
        """Record that members have joined. A member that is already recorded keeps its earlier time."""
        now_s = self._clock()
        for worker in workers:
            self._since.setdefault(worker, now_s)

    def lost(self, worker: Worker) -> None:
        """Begin the pause of a machine whose member was lost or did not start."""
        now_s = self._clock()
        has_lasted = now_s - self._since.pop(worker, now_s) >= self._lasting_s
        doublings = 0
        if worker in self._pauses and not has_lasted:
            doublings = self._pauses[worker][0] + 1
        self._pauses[worker] = doublings, now_s + backoff_s(self._first_s, doublings, self._longest_s)

    def __contains__(self, worker: Worker) -> bool:
        """Return whether a machine is paused now."""
        return worker in self._pauses and self._clock() < self._pauses[worker][1]

    @property
    def paused(self) -> frozenset[Worker]:
        """All machines that are paused now."""
        return frozenset(worker for worker in self._pauses if worker in self)
