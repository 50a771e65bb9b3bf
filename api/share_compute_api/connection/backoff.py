"""Delays between attempts at one operation, with optional jitter."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from share_compute.backoff import backoff_s


@dataclass(slots=True)
class ExponentialBackoff:
    """Exponential backoff of one operation.

    Args:
        first_s: delay after the first failure, in seconds.
        longest_s: longest delay, in seconds.
        has_jitter: whether each delay is multiplied by a random factor between 0.5 and 1.
    """

    first_s: float
    longest_s: float
    has_jitter: bool = False
    _failures: int = field(default=0, init=False)

    def failed(self) -> float:
        """Count a failure; return the delay before the next attempt, in seconds."""
        pause_s = backoff_s(self.first_s, self._failures, self.longest_s)
        self._failures += 1
        return random.uniform(pause_s / 2, pause_s) if self.has_jitter else pause_s  # noqa: S311 - no secret

    def reset(self) -> None:
        """Reset the delay to its initial value, after a success."""
        self._failures = 0
