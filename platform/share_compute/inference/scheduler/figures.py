"""Measure the latency, throughput and batch size of a replica."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from share_compute.inference.scheduler.events import Embedded, Emitted, SequenceEvent

_SAMPLES = 2048
"""Number of latencies kept, the most recent ones."""
_STEPS = 64
"""Number of engine steps whose batch sizes are kept, the most recent ones."""
_RATE_S = 10.0
"""Window in seconds over which tokens are counted."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Latency percentiles over the last measurements; None before the first measurement."""

    p50_s: float | None
    p95_s: float | None


@dataclass(frozen=True, slots=True)
class RecentFigures:
    """Recent latency, throughput and batch size of a replica."""

    tokens_per_s: float
    """Rate of generated tokens and of tokens of embedded texts; see `LatencyMeter.tokens_per_s`."""
    first_token: Latency
    """Seconds from a sequence's arrival to its first token, or its vector."""
    next_token: Latency
    """Seconds between consecutive tokens of a sequence."""
    batch_size: float | None
    """Mean number of sequences in the last engine steps; None before the first step."""


class LatencyMeter:
    """Meter of a replica's latency and throughput; callers pass the times."""

    def __init__(self) -> None:
        self._began: dict[int, float] = {}
        """Arrival time of each sequence that has no token yet."""
        self._last: dict[int, float] = {}
        """Time of the last token of each sequence that has a token and has not ended."""
        self._first_s: deque[float] = deque(maxlen=_SAMPLES)
        self._between_s: deque[float] = deque(maxlen=_SAMPLES)
        self._emitted: deque[tuple[float, int]] = deque()
        """(time in seconds, number of tokens) of each report of tokens, oldest first."""
        self._batches: deque[int] = deque(maxlen=_STEPS)
        """Number of sequences in each of the last engine steps."""

    def came(self, sequence: int, now_s: float) -> None:
        """Record that a sequence arrived."""
        self._began[sequence] = now_s

    def sent(self, sequences: int) -> None:
        """Record that an engine step with ``sequences`` sequences was sent."""
        if sequences:
            self._batches.append(sequences)

    def record_events(self, events: Iterable[SequenceEvent], now_s: float) -> None:
        """Record the tokens, vectors and ends that these events report."""
        tokens = 0
        for event in events:
            if isinstance(event, Emitted):
                tokens += 1
                self._token(event.sequence, now_s)
                continue
            if isinstance(event, Embedded):
                tokens += event.tokens
                self._token(event.sequence, now_s)
            self._began.pop(event.sequence, None)
            self._last.pop(event.sequence, None)
        if tokens:
            self._emitted.append((now_s, tokens))
        self._drop_old(now_s)

    def _token(self, sequence: int, now_s: float) -> None:
        before_s = self._last.get(sequence)
        if before_s is not None:
            self._between_s.append(now_s - before_s)
        elif sequence in self._began:
            self._first_s.append(now_s - self._began.pop(sequence))
        self._last[sequence] = now_s

    def _drop_old(self, now_s: float) -> None:
        while self._emitted and self._emitted[0][0] < now_s - _RATE_S:
            self._emitted.popleft()

    def tokens_per_s(self, now_s: float) -> float:
        """Return the rate of tokens in the last `_RATE_S` seconds; 0.0 with fewer than two reports of tokens.

        The tokens are divided by the time from the first report to the last. A gap between two reports counts as one
        second at most, so that idle time does not lower the rate.
        """
        self._drop_old(now_s)
        if len(self._emitted) < 2:
            return 0.0
        busy_s = sum(min(after - before, 1.0) for (before, _), (after, _) in pairwise(self._emitted))
        return sum(tokens for _, tokens in self._emitted) / max(busy_s, 1e-3)

    def measured(self, now_s: float) -> RecentFigures:
        """Return the recent latencies, the token rate and the mean batch size."""
        batch_size = sum(self._batches) / len(self._batches) if self._batches else None
        return RecentFigures(
            self.tokens_per_s(now_s), _latency(self._first_s), _latency(self._between_s), batch_size
        )


def _latency(seconds: Iterable[float]) -> Latency:
    ordered = sorted(seconds)
    if not ordered:
        return Latency(None, None)
    return Latency(_at(ordered, 0.5), _at(ordered, 0.95))


def _at(ordered: list[float], share: float) -> float:
    return ordered[max(0, ceil(share * len(ordered)) - 1)]
