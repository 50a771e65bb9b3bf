"""Progress of the workers of a sparse model, as steps with their mean loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """Progress of one worker's process."""

    clock: int
    """Last minibatch, which counts those of earlier processes too."""
    examples: int
    """Rows in the minibatches of this process."""
    loss: float
    """Sum of their losses."""


@dataclass(frozen=True, slots=True)
class StepProgress:
    """Progress since the last step that was reported."""

    step: int
    examples: int
    loss: float
    """Mean loss of these rows, each before its own update."""


class RunProgress:
    """Turns reports of workers into steps. A step is one minibatch of the worker that is furthest behind.

    Args:
        lasts: number of minibatches of each worker in all passes.
        step: step at which training continues; steps up to it are not reported.
    """

    def __init__(self, lasts: Sequence[int], step: int = 0) -> None:
        self._lasts = lasts
        self._known = [WorkerProgress(0, 0, 0.0) for _ in lasts]
        self._step = step
        self._examples, self._loss = 0, 0.0

    @property
    def total_steps(self) -> int:
        """Number of minibatches of the worker that has most."""
        return max(self._lasts)

    def seen(self, worker: int, report: WorkerProgress) -> None:
        """Process a worker's report. After a restart, the worker's process counts from 0 again."""
        before = self._known[worker]
        if report.examples < before.examples:
            before = WorkerProgress(0, 0, 0.0)
        self._examples += report.examples - before.examples
        self._loss += report.loss - before.loss
        self._known[worker] = report

    def next_step(self) -> StepProgress | None:
        """Return the progress since the last reported step; None if no new step is complete."""
        step = min(
            self.total_steps if known.clock >= last else known.clock
            for known, last in zip(self._known, self._lasts, strict=True)
        )
        if step <= self._step or not self._examples:
            return None
        self._step = step
        found = StepProgress(step, self._examples, self._loss / self._examples)
        self._examples, self._loss = 0, 0.0
        return found
