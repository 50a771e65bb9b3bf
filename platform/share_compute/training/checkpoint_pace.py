"""Decide when a job without ``checkpoint_every`` writes its next checkpoint: by time, at a bounded cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

_MOST_PAUSED = 0.05
"""Maximum fraction of the time for which training may be paused for checkpoints."""
_MOST_WRITING = 0.25
"""Maximum fraction of the time in which members may send a checkpoint while training continues."""


@dataclass(frozen=True, slots=True)
class CheckpointPace:
    """Time of the next checkpoint, from start and cost of the last one. Times are of one monotonic clock, in seconds.

    Args:
        every_s: shortest time between the starts of two checkpoints; expensive checkpoints are further apart.
        begun_s: start of the last checkpoint, or of training.
        paused_s: time for which training paused for the last checkpoint.
        writing_s: time from the start of the last checkpoint until it was complete or given up.
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
        """Return the pace after a checkpoint began, for any reason."""
        return replace(self, begun_s=now_s)

    def paused(self, seconds: float) -> CheckpointPace:
        """Return the pace after training paused for the last checkpoint."""
        return replace(self, paused_s=seconds)

    def written(self, now_s: float) -> CheckpointPace:
        """Return the pace after the last checkpoint became complete, or was given up."""
        return replace(self, writing_s=now_s - self.begun_s)
