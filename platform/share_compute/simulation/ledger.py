"""Totals of a simulated job: its time by purpose, and its committed and lost steps."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from share_compute.simulation.report import Hours
from share_compute.simulation.rules import Downtime

_CURVE_POINTS = 60
_NEARLY = 1e-9


class Ledger:
    """Totals of time and steps over a job's epochs. Callers open and close the epochs in order of time.

    Args:
        duration_s: length of the whole simulation, in seconds.
    """

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._hours: defaultdict[str, float] = defaultdict(float)
        self._curve = np.zeros(_CURVE_POINTS)
        self._since_s, self._pause, self._carried = 0.0, Downtime(), 0.0
        self.step_s = math.inf
        """Step time of the current epoch, in seconds; infinite while there is no plan."""
        self.committed = self.lost = 0

    @property
    def begun_s(self) -> float:
        """Time at which the current epoch starts to compute."""
        return self._since_s + self._pause.total_s

    @property
    def hours(self) -> Hours:
        """Time by purpose, until the end of the last closed epoch."""
        return Hours(**{name: self._hours[name] for name in Hours.model_fields})

    @property
    def curve(self) -> tuple[float, ...]:
        """Committed steps per second, in each of `_CURVE_POINTS` equal parts of the time."""
        return tuple(float(steps) * _CURVE_POINTS / self._duration_s for steps in self._curve)

    def open(self, now_s: float, step_s: float, pause: Downtime, carried: float) -> None:
        """Begin an epoch.

        Args:
            now_s: start of the epoch; the previous epoch was closed at this time.
            step_s: time of its steps; infinite if there is no plan.
            pause: pause before its first step.
            carried: share of its first step that is already done.
        """
        self._since_s, self.step_s, self._pause, self._carried = now_s, step_s, pause, carried

    def end_of_step_s(self, now_s: float) -> float:
        """Return the time at which the step in progress ends."""
        done = self._carried + max(0.0, now_s - self.begun_s) / self.step_s
        return self.begun_s + (math.ceil(done - _NEARLY) - self._carried) * self.step_s

    def close(self, now_s: float) -> float:
        """End the current epoch, and add its time and its committed steps to the sums.

        Returns:
            Share of the step in progress that is done (0 to 1).
        """
        start_s = self._since_s
        if math.isinf(self.step_s):
            self._hours["waiting_s"] += now_s - start_s
            return self._carried
        for name, lasts_s in self._pause._asdict().items():
            stop_s = min(start_s + lasts_s, now_s)
            self._hours[name] += stop_s - start_s
            start_s = stop_s
        self._hours["computing_s"] += now_s - start_s
        done = self._carried + (now_s - start_s) / self.step_s
        whole = math.floor(done + _NEARLY)
        self.committed += whole
        self._draw(whole, start_s, now_s)
        return max(0.0, done - whole)

    def lose(self, redone: float) -> None:
        """Record that the share ``redone`` (0 to 1) of a step of the last closed epoch is lost and computed again."""
        if redone > 0:
            self.lost += 1
            self._hours["computing_s"] -= redone * self.step_s
            self._hours["redoing_s"] += redone * self.step_s

    def _draw(self, steps: int, start_s: float, stop_s: float) -> None:
        """Add steps to the curve, evenly over the time from ``start_s`` to ``stop_s``."""
        if not steps:
            return
        edges = np.linspace(0.0, self._duration_s, _CURVE_POINTS + 1)
        inside = np.minimum(edges[1:], stop_s) - np.maximum(edges[:-1], start_s)
        self._curve += steps * np.maximum(inside, 0.0) / (stop_s - start_s)
