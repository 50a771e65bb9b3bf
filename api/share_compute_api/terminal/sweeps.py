"""Summaries of sweeps: the numbers of trials that run, wait and have ended, and the best result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel

from share_compute_api.terminal.output import number

if TYPE_CHECKING:
    from share_compute.store.records import JobRecord
    from share_compute_api.schemas.sweeps import SweepView


class SweepSummary(BaseModel):
    """The trials of a sweep in one line."""

    id: str
    name: str
    running: int
    """Number of trials that are planned or run."""
    waiting: int
    """Number of trials that are queued or not started yet."""
    ended: int
    metric: str
    best: int | None
    """Number of the best trial, from 1; null while no trial has a value."""
    best_value: float | None

    @property
    def best_text(self) -> str | None:
        """The best result, such as ``validation loss 0.12 (trial 3)``; None if there is none."""
        if self.best is None:
            return None
        return f"{self.metric.replace('_', ' ')} {number(self.best_value)} (trial {self.best})"


def summary_of(sweep: JobRecord, view: SweepView) -> SweepSummary:
    """Return the summary of a sweep and its trials."""
    ended = sum(trial.state is not None and trial.state.is_final for trial in view.trials)
    waiting = sum(trial.state is None or trial.state.value == "queued" for trial in view.trials)
    if sweep.state.is_final:  # trials that have not been started do not count as waiting
        ended, waiting = ended + waiting, 0
    best = next((trial for trial in view.trials if trial.number == view.best), None)
    return SweepSummary(
        id=sweep.id,
        name=sweep.name,
        running=len(view.trials) - ended - waiting,
        waiting=waiting,
        ended=ended,
        metric=view.metric,
        best=view.best,
        best_value=None if best is None else best.value,
    )
