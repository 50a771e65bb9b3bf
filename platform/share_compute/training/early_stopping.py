"""Early stopping: ends a job when its validation loss no longer improves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from share_compute.specification import EarlyStoppingSpec


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """Early-stopping state after the validations so far.

    Args:
        spec: settings of the job.
        best_loss: loss of the last validation that counted as an improvement; infinite before the first.
        best_step: step of the validation with ``best_loss``; 0 before the first.
        worse: number of validations after ``best_step``.
    """

    spec: EarlyStoppingSpec
    best_loss: float = math.inf
    best_step: int = 0
    worse: int = 0

    def after(self, step: int, loss: float) -> EarlyStopping:
        """Return the state after one more validation."""
        if loss < self.best_loss - self.spec.min_delta:
            return EarlyStopping(self.spec, loss, step)
        return EarlyStopping(self.spec, self.best_loss, self.best_step, self.worse + 1)

    def after_all(self, losses: Iterable[tuple[int, float]]) -> EarlyStopping:
        """Return the state after more validations: pairs of step and loss, in order."""
        state = self
        for step, loss in losses:
            state = state.after(step, loss)
        return state

    @property
    def stops(self) -> bool:
        """Whether at least ``patience`` validations in a row brought no improvement."""
        return self.worse >= self.spec.patience

    @property
    def reason(self) -> str:
        """Human-readable reason for which the job ends."""
        return (
            f"validation loss has not fallen below {self.best_loss:.4f} (step {self.best_step}) "
            f"in {self.worse} validations"
        )
