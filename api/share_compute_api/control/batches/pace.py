"""Measures how many rows and tokens are answered per second."""

from __future__ import annotations

from collections import deque

_SPAN_S = 30.0
_LEAST_S = 0.5


class Pace:
    """Measures rows and tokens per second.

    The rates are means over a window that begins about ``_SPAN_S`` seconds before the newest answer and ends now.
    They fall while no row is answered.

    Args:
        now_s: time at which the first row is sent, in seconds.
    """

    def __init__(self, now_s: float) -> None:
        self._seen: deque[tuple[float, int, int]] = deque([(now_s, 0, 0)])
        """(Time in seconds, rows answered so far, tokens answered so far) for each answer in the window."""

    def see(self, now_s: float, tokens: int) -> None:
        """Count one answered row and its tokens."""
        _, rows, before = self._seen[-1]
        self._seen.append((now_s, rows + 1, before + tokens))
        while len(self._seen) > 2 and now_s - self._seen[1][0] > _SPAN_S:
            self._seen.popleft()

    def rates(self, now_s: float) -> tuple[float, float] | None:
        """Return (rows per second, tokens per second); None before the first answer and in the first ``_LEAST_S`` s."""
        (first_s, first_rows, first_tokens), (_, rows, tokens) = self._seen[0], self._seen[-1]
        if rows == first_rows or now_s - first_s < _LEAST_S:
            return None
        return (rows - first_rows) / (now_s - first_s), (tokens - first_tokens) / (now_s - first_s)
