"""Exponential backoff: the delay before the next attempt doubles with each consecutive failure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

_MOST_DOUBLINGS = 30
"""Limit of the exponent: a count of failures that grows for days must not overflow."""


def doubled_s(first_s: float, failures: int, longest_s: float = math.inf) -> float:
    """Return the delay in seconds after ``failures`` failures: ``first_s * 2**failures``, up to ``longest_s``."""
    return min(first_s * 2.0 ** min(failures, _MOST_DOUBLINGS), longest_s)


@dataclass(slots=True)
class ExponentialBackoff:
    """Delays between attempts at one operation.

    Args:
        first_s: delay after the first failure, in seconds.
        longest_s: longest delay, in seconds.
        has_jitter: whether each delay is drawn at random between half and all of its value, so that clients that lost a
            server at the same moment do not reconnect at the same moment.
    """

    first_s: float
    longest_s: float
    has_jitter: bool = False
    _failures: int = field(default=0, init=False)

    def failed(self) -> float:
        """Count a failure; return the delay before the next attempt, in seconds."""
        pause_s = doubled_s(self.first_s, self._failures, self.longest_s)
        self._failures += 1
        return random.uniform(pause_s / 2, pause_s) if self.has_jitter else pause_s  # noqa: S311 - no secret

    def reset(self) -> None:
        """Reset the delay to the first one, after a success."""
        self._failures = 0
