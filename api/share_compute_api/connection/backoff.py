"""Exponential backoff: the pause before the next try doubles with each failure in a row."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

_MOST_DOUBLINGS = 30
"""Limit of the exponent: a count of failures that grows for days must not overflow."""


def doubled_s(first_s: float, failures: int, longest_s: float = math.inf) -> float:
    """Return the pause in seconds after ``failures`` earlier failures: ``first_s * 2**failures``, limited."""
    return min(first_s * 2.0 ** min(failures, _MOST_DOUBLINGS), longest_s)


@dataclass(slots=True)
class ExponentialBackoff:
    """Pauses between tries of one thing.

    Args:
        first_s: pause after the first failure, in seconds.
        longest_s: longest pause, in seconds.
        has_jitter: whether each pause is drawn between half of it and all of it. Clients that lost a server at the same
            moment must not all reconnect at the same moment.
    """

    first_s: float
    longest_s: float
    has_jitter: bool = False
    _failures: int = field(default=0, init=False)

    def failed(self) -> float:
        """Count a failure; return the pause before the next try, in seconds."""
        pause_s = doubled_s(self.first_s, self._failures, self.longest_s)
        self._failures += 1
        return random.uniform(pause_s / 2, pause_s) if self.has_jitter else pause_s  # noqa: S311 - no secret

    def reset(self) -> None:
        """Start again with the first pause, after a success."""
        self._failures = 0
