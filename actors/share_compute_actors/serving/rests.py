"""Exponential backoff for machines on which a member was lost; it doubles while losses soon follow each other."""

from __future__ import annotations

from share_compute.protocol.roster import Worker

_REST_S = 2.0
_LONGEST_REST_S = 300.0


class Rests:
    """Records losses by machine; the caller provides the time."""

    def __init__(self) -> None:
        self._losses: dict[Worker, int] = {}
        self._until_s: dict[Worker, float] = {}

    def lost(self, worker: Worker, now_s: float) -> None:
        """Record that a member on this machine was lost, or did not start."""
        is_soon = now_s - self._until_s.get(worker, 0.0) < _LONGEST_REST_S
        losses = self._losses.get(worker, 0) + 1 if is_soon else 1
        self._losses[worker] = losses
        self._until_s[worker] = now_s + min(_REST_S * 2.0 ** (losses - 1), _LONGEST_REST_S)

    def resting(self, now_s: float) -> frozenset[Worker]:
        """Return the machines on which no member may be started now."""
        return frozenset(worker for worker, until_s in self._until_s.items() if now_s < until_s)
