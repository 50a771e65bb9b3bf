"""Machines that rest after a member on them was lost, longer each time that it happens again soon."""

from __future__ import annotations

from share_compute.protocol.roster import Worker

_REST_S = 2.0
_LONGEST_REST_S = 300.0


class Rests:
    """Remembers what happened on which machine; it has no clock."""

    def __init__(self) -> None:
        self._losses: dict[Worker, int] = {}
        self._until_s: dict[Worker, float] = {}

    def lost(self, worker: Worker, now_s: float) -> None:
        """A member was lost, or did not come to life."""
        is_soon = now_s - self._until_s.get(worker, 0.0) < _LONGEST_REST_S
        losses = self._losses.get(worker, 0) + 1 if is_soon else 1
        self._losses[worker] = losses
        self._until_s[worker] = now_s + min(_REST_S * 2.0 ** (losses - 1), _LONGEST_REST_S)

    def resting(self, now_s: float) -> frozenset[Worker]:
        """Return the machines on which no member is to be started now."""
        return frozenset(worker for worker, until_s in self._until_s.items() if now_s < until_s)
