"""Decides when the next timed checkpoint of a job is due."""

from __future__ import annotations

from dataclasses import dataclass, replace

_MOST_PAUSED = 0.05
"""Maximum fraction of the time for which training may be paused for checkpoints."""
_MOST_WRITING = 0.25
"""Maximum fraction of the time during which a checkpoint may be in progress."""


@dataclass(frozen=True, slots=True)
class CheckpointPace:
    """Determines when the next checkpoint is due, from the start and the cost of the last one.

    All points in time are seconds of one monotonic clock.

    Args:
        every_s: minimum time between the starts of two checkpoints.
        begun_s: start of the last checkpoint, or of training.
        paused_s: time for which training paused for the last checkpoint.
        writing_s: time from the start of the last checkpoint until it was complete or abandoned.
    """

    every_s: float
    begun_s: float
    paused_s: float = 0.0
    writing_s: float = 0.0

    @property
    def period_s(self) -> float:
        """Minimum time from the start of the last checkpoint to the start of the next, in seconds."""
        return max(self.every_s, self.paused_s / _MOST_PAUSED, self.writing_s / _MOST_WRITING)

    def is_due(self, now_s: float) -> bool:
        """Return whether the next checkpoint may begin."""
        return now_s - self.begun_s >= self.period_s

    def began(self, now_s: float) -> CheckpointPace:
        """Return the pace after a checkpoint began at ``now_s``."""
        return replace(self, begun_s=now_s)

    def paused(self, seconds: float) -> CheckpointPace:
        """Return the pace after the last checkpoint paused training for this many seconds."""
        return replace(self, paused_s=seconds)

    def written(self, now_s: float) -> CheckpointPace:
        """Return the pace after the last checkpoint was completed or abandoned at ``now_s``."""
        return replace(self, writing_s=now_s - self.begun_s)
