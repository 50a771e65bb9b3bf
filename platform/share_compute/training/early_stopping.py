"""When validations say that a job has learnt what it can."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from share_compute.specification import EarlyStoppingSpec


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """What the validations so far say. It follows from them alone, so a resumed job reads them again.

    Args:
        spec: of the job.
        best_loss: the lowest that counts.
        best_step: after which step that was.
        worse: validations in a row since then.
    """

    spec: EarlyStoppingSpec
    best_loss: float = math.inf
    best_step: int = 0
    worse: int = 0

    def after(self, step: int, loss: float) -> EarlyStopping:
        """Return what they say with one more."""
        if loss < self.best_loss - self.spec.min_delta:
            return EarlyStopping(self.spec, loss, step)
        return EarlyStopping(self.spec, self.best_loss, self.best_step, self.worse + 1)

    def after_all(self, losses: Iterable[tuple[int, float]]) -> EarlyStopping:
        """Return what they say with some more: pairs of step and loss, in order."""
        state = self
        for step, loss in losses:
            state = state.after(step, loss)
        return state

    @property
    def stops(self) -> bool:
        """Whether the job ends."""
        return self.worse >= self.spec.patience

    @property
    def reason(self) -> str:
        """Why it ends, in words."""
        return (
            f"validation loss has not fallen below {self.best_loss:.4f} (step {self.best_step}) "
            f"in {self.worse} validations"
        )
