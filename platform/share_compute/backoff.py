"""Exponential backoff: the delay before the next attempt doubles with each consecutive failure."""

from __future__ import annotations

import math

_MOST_DOUBLINGS = 30
"""Maximum exponent; ``2.0**failures`` raises OverflowError for 1024 failures or more."""


def backoff_s(first_s: float, failures: int, longest_s: float = math.inf) -> float:
    """Return the delay before the next attempt, in seconds: ``first_s * 2**failures``, at most ``longest_s``.

    The exponent is clamped to `_MOST_DOUBLINGS`.

    Args:
        first_s: the first delay, in seconds.
        failures: number of times to double the delay; 0 after the first failure.
        longest_s: the longest delay, in seconds.
    """
    return min(first_s * 2.0 ** min(failures, _MOST_DOUBLINGS), longest_s)
