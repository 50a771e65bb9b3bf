"""Body of the route that lists the trials of a sweep."""

from __future__ import annotations

from typing import Any, Literal

from share_compute.lifecycle.states import JobState
from share_compute.store.records import RungRecord
from share_compute_api.schemas.bodies import ResponseBody


class TrialView(ResponseBody):
    """A trial of a sweep."""

    number: int
    """Number of the trial, from 1."""
    settings: dict[str, Any]
    """Values of the searched fields, by their names with dots."""
    job_id: str | None
    """Id of the trial's job; null before it starts, and after the job was deleted."""
    state: JobState | None
    """State of the job; null if there is none."""
    reason: str
    """Cause of the state, in one sentence."""
    step: int
    total_steps: int
    value: float | None
    """Value of the metric at the last validation; null before the first one."""
    value_step: int | None
    """Step of this validation."""
    rungs: tuple[RungRecord, ...]
    """Comparisons with other trials, in order."""
    is_stopped: bool
    """Whether the sweep stopped the trial before its end."""


class SweepView(ResponseBody):
    """Trials of a sweep, best first."""

    metric: str
    goal: Literal["min", "max"]
    fields: list[str]
    """Names of the searched fields, in the order of the job file."""
    trials: list[TrialView]
    """All trials: those that ran to their end by their values, then other ones with values, then those without."""
    best: int | None
    """Number of the best trial; null while no trial has a value."""
