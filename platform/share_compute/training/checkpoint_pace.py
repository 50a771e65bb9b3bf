"""Decide when a job that names no interval writes its next checkpoint: by time, at a bounded cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

_MOST_PAUSED = 0.05
"""Largest share of the time for which training may stand still for checkpoints."""
_MOST_WRITING = 0.25
"""Largest share of the time in which a checkpoint may be on its way while training goes on, over the members' links."""


@dataclass(frozen=True, slots=True)
class CheckpointPace:
    """When the last checkpoint began and what it cost. Times are of one monotonic clock, in seconds.

    Args:
        every_s: time from the beginning of one checkpoint to that of the next; longer while checkpoints cost much.
        begun_s: when the last one began, or training did.
        paused_s: how long training stood still for the last one.
        writing_s: how long the last one took until it was whole.
    """

    every_s: float
    begun_s: float
    paused_s: float = 0.0
    writing_s: float = 0.0

    @property
    def period_s(self) -> float:
        """Time from the beginning of the last checkpoint to that of the next."""
        return max(self.every_s, self.paused_s / _MOST_PAUSED, self.writing_s / _MOST_WRITING)

    def is_due(self, now_s: float) -> bool:
        """Return whether the next checkpoint may begin."""
        return now_s - self.begun_s >= self.period_s

    def began(self, now_s: float) -> CheckpointPace:
        """Return the pace after a checkpoint began, for whatever reason it did."""
        return replace(self, begun_s=now_s)

    def paused(self, seconds: float) -> CheckpointPace:
        """Return the pace after training stood still for the last checkpoint."""
        return replace(self, paused_s=seconds)

    def written(self, now_s: float) -> CheckpointPace:
        """Return the pace after the last checkpoint became whole, or was given up."""
        return replace(self, writing_s=now_s - self.begun_s)
