"""Early stopping: ends a job when a metric of its validations no longer improves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from share_compute.specification import EarlyStoppingSpec, TargetSpec
from share_compute.specification.task import RISING


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """Early-stopping state after the validations so far.

    Args:
        spec: settings of the job.
        best: value of the metric in the last validation that counted as an improvement; None before the first.
        best_step: step of the validation with ``best``; 0 before the first.
        worse: number of validations after ``best_step``.
    """

    spec: EarlyStoppingSpec
    best: float | None = None
    best_step: int = 0
    worse: int = 0

    def after(self, step: int, figures: Mapping[str, float]) -> EarlyStopping:
        """Return the state after one more validation.

        A validation without the metric, for example an undefined area under a curve, does not count as an improvement.
        """
        value = figures.get(self.spec.figure)
        if value is not None and self._improves(value):
            return EarlyStopping(self.spec, value, step)
        return EarlyStopping(self.spec, self.best, self.best_step, self.worse + 1)

    def _improves(self, value: float) -> bool:
        rises = self.spec.metric in RISING
        best = self.best if self.best is not None else (-math.inf if rises else math.inf)
        return value > best + self.spec.min_delta if rises else value < best - self.spec.min_delta

    def after_all(self, validations: Iterable[tuple[int, Mapping[str, float]]]) -> EarlyStopping:
        """Return the state after more validations: pairs of step and metrics, in order."""
        state = self
        for step, figures in validations:
            state = state.after(step, figures)
        return state

    @property
    def stops(self) -> bool:
        """Whether at least ``patience`` validations in a row brought no improvement."""
        return self.worse >= self.spec.patience

    @property
    def reason(self) -> str:
        """Human-readable reason for which the job ends."""
        metric = named(self.spec.figure)
        if self.best is None:
            return f"no validation has a value of {metric}"
        return (
            f"{metric} has not {'risen above' if self.spec.metric in RISING else 'fallen below'} {self.best:.4f} "
            f"(step {self.best_step}) in {self.worse} validations"
        )


def reaches(target: TargetSpec, figures: Mapping[str, float]) -> bool:
    """Return whether a validation is at least as good as the target value of the job."""
    value = figures.get(target.figure)
    if value is None:
        return False
    return value >= target.value if target.metric in RISING else value <= target.value


def named(metric: str) -> str:
    """Return the name of a metric for use in sentences."""
    return metric.replace("_", " ")
