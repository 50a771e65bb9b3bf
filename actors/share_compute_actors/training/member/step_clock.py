"""Measures how long a step takes at one member, and how long the member computes in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Spent(NamedTuple):
    """Durations of one step at one member, in seconds."""

    seconds: float
    """Duration of the step; only the computing time if `StepClock.stop` was called."""
    waited_s: float
    """The part of ``seconds`` in which the member did not compute."""


class StepClock:
    """Measures the duration of a step, and the part of it in which the member computed."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._computed_s = 0.0

    @property
    def is_running(self) -> bool:
        """Whether the clock was started, and neither stopped nor read since then."""
        return self._began_s is not None

    def start(self) -> None:
        """Start the clock at the beginning of a step."""
        self._began_s, self._computed_s = time.perf_counter(), 0.0

    def stop(self) -> None:
        """Stop the clock, because the time until the next epoch is not part of a step."""
        self._began_s = None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the time inside the context as computing time."""
        start_s = time.perf_counter()
        yield
        self._computed_s += time.perf_counter() - start_s

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Exclude the time inside the context from the computing time of an enclosing `computing` context."""
        start_s = time.perf_counter()
        yield
        self._computed_s -= time.perf_counter() - start_s

    def read(self) -> Spent:
        """Stop the clock at the end of a step, and return the step's durations.

        If `stop` was called, ``seconds`` is only the computing time, and ``waited_s`` is 0.
        """
        computed_s = self._computed_s
        seconds = time.perf_counter() - self._began_s if self._began_s is not None else computed_s
        self._began_s, self._computed_s = None, 0.0
        return Spent(seconds, max(0.0, seconds - computed_s))
