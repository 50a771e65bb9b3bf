"""Deadline for the checkpoint with which a suspended run ends."""

from __future__ import annotations

import time

SUSPEND_S = 60.0
"""Longest wait for the checkpoint of a run that is suspended."""


class Suspension:
    """State of a suspension: whether a run must end, and until when it may wait for a checkpoint."""

    def __init__(self) -> None:
        self._until: float | None = None
        self.is_saved = False
        """Whether the checkpoint was saved. The suspension is final then."""

    def want(self, *, is_wanted: bool) -> None:
        """Begin a suspension, or take it back."""
        if not is_wanted and not self.is_saved:
            self._until = None
        elif is_wanted and self._until is None:
            self._until = time.monotonic() + SUSPEND_S

    @property
    def is_wanted(self) -> bool:
        """Whether the run has to end."""
        return self._until is not None

    @property
    def is_late(self) -> bool:
        """Whether the checkpoint took too long."""
        return self._until is not None and time.monotonic() > self._until
