"""Schedule reduce_on_plateau: lowers the learning rate when a metric of the validations no longer improves.

The semantics are those of ``torch.optim.lr_scheduler.ReduceLROnPlateau``. The state depends only on the validations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from share_compute.specification import PlateauOptions
from share_compute.specification.task import RISING

_LEAST_CHANGE = 1e-8
"""Changes of the learning rate that are not larger than this are ignored, as torch does by default."""


@dataclass(frozen=True, slots=True)
class Plateau:
    """State of the schedule after the validations so far.

    Args:
        options: options of the schedule.
        rate: learning rate of the next step, without warm-up.
        best: best value of the metric so far; None before the first validation that has it.
        bad: number of validations without improvement since the last one, or since the last reduction.
        cooldown: number of validations after a reduction that are still not counted.
    """

    options: PlateauOptions
    rate: float
    best: float | None = None
    bad: int = 0
    cooldown: int = 0

    def after(self, figures: Mapping[str, float]) -> Plateau:
        """Return the state after one more validation; without the metric, a validation counts as no improvement."""
        value = figures.get(self.options.metric)
        is_better = value is not None and self._improves(value)
        best, bad = (value, 0) if is_better else (self.best, self.bad + 1)
        cooldown = self.cooldown
        if cooldown > 0:
            cooldown, bad = cooldown - 1, 0
        if bad <= self.options.patience:
            return replace(self, best=best, bad=bad, cooldown=cooldown)
        lower = max(self.rate * self.options.factor, self.options.min_lr)
        rate = lower if self.rate - lower > _LEAST_CHANGE else self.rate
        return replace(self, rate=rate, best=best, bad=0, cooldown=self.options.cooldown)

    def after_all(self, validations: Iterable[tuple[int, Mapping[str, float]]]) -> Plateau:
        """Return the state after more validations: pairs of step and metrics, in order."""
        state = self
        for _, figures in validations:
            state = state.after(figures)
        return state

    def _improves(self, value: float) -> bool:
        rises = self.options.metric in RISING
        best = self.best if self.best is not None else (-math.inf if rises else math.inf)
        threshold = self.options.threshold
        if self.options.threshold_mode == "abs":
            return value > best + threshold if rises else value < best - threshold
        return value > best * (1.0 + threshold) if rises else value < best * (1.0 - threshold)
