"""Decisions of a sweep: which trials start, continue and stop.

Early stopping is the asynchronous successive halving of Li et al., "A System for Massively Parallel Hyperparameter
Tuning" (MLSys 2020). As in Ray Tune, trials are never paused to be promoted later. A trial that is not among the best
at a rung stops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from share_compute.lifecycle.states import JobState
from share_compute.specification import SweepJob

CANCELLED = "the sweep was cancelled"
"""Reason of trials that stop with their sweep; they continue if the sweep is resumed."""
OUT_OF_TIME = "the time of the sweep is over"
_MOST_STEPS = 2**31
_RESUMABLE = (JobState.cancelled, JobState.failed)


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial that was started."""

    number: int
    job_id: str
    state: JobState
    steps: int
    """Number of steps of the trial's job."""
    judged: Mapping[int, float]
    """Value of the metric at each rung at which the trial was compared, by the step of the rung."""
    values: Mapping[int, float]
    """Values of the metric at all rungs that the trial has reached, by their steps."""
    is_stopped: bool = False
    """Whether the sweep has stopped the trial."""
    has_lost: bool = False
    """Whether a comparison has stopped the trial; a trial that was resumed by hand is not compared again."""
    is_interrupted: bool = False
    """Whether the trial ended because its sweep was cancelled; it continues with the sweep."""
    has_result: bool = False
    """Whether the trial has a value of the metric at any step."""


@dataclass(frozen=True, slots=True)
class StartTrial:
    """Start the trial with this number."""

    number: int


@dataclass(frozen=True, slots=True)
class ResumeTrial:
    """Resume a trial that was cancelled with its sweep."""

    job_id: str


@dataclass(frozen=True, slots=True)
class JudgeTrial:
    """Record a trial's comparison at a rung; stop the trial if it is not kept."""

    job_id: str
    step: int
    value: float
    is_kept: bool
    reason: str


@dataclass(frozen=True, slots=True)
class StopTrial:
    """Stop a trial."""

    job_id: str
    reason: str
    is_interrupted: bool = False


@dataclass(frozen=True, slots=True)
class FinishSweep:
    """End the sweep."""

    state: JobState
    reason: str


SweepEffect: TypeAlias = StartTrial | ResumeTrial | JudgeTrial | StopTrial | FinishSweep


def rungs_of(sweep: SweepJob) -> tuple[int, ...]:
    """Return the steps at which trials of a sweep are compared; trials may have different numbers of steps."""
    return () if sweep.early_stopping is None else sweep.early_stopping.rungs(_MOST_STEPS)


def is_kept(value: float, others: Iterable[float], factor: int, *, is_rising: bool) -> bool:
    """Return whether a trial continues after a rung: whether it is among the best ``max(1, n // factor)`` of n trials.

    Args:
        value: value of the trial's metric at the rung.
        others: values of the trials that were compared there before.
        factor: reduction factor.
        is_rising: whether higher values are better.
    """
    before = list(others)
    better = sum(other > value if is_rising else other < value for other in before)
    return better < max(1, (len(before) + 1) // factor)


def decide(
    sweep: SweepJob, trials: Sequence[Trial], *, last_started: int, seconds: float, is_cancelled: bool
) -> list[SweepEffect]:
    """Return the decisions to carry out now for a running sweep.

    Args:
        sweep: specification of the sweep.
        trials: the trials that were started and not deleted, by number.
        last_started: highest number of a trial that was started, also if the trial was deleted; 0 if there is none.
        seconds: time that the sweep has run, without the time between its end and its resumption, in seconds.
        is_cancelled: whether the sweep was asked to stop.
    """
    unfinished = [trial for trial in trials if not trial.state.is_final]
    if is_cancelled:
        if not unfinished:
            return [FinishSweep(JobState.cancelled, f"cancelled; {_count(trials, sweep)}")]
        return [
            StopTrial(one.job_id, CANCELLED, is_interrupted=True) for one in unfinished if not one.is_stopped
        ]
    judgements = _judgements(sweep, trials)
    stopped = {one.job_id for one in judgements if not one.is_kept}
    effects: list[SweepEffect] = [*judgements]
    if sweep.time_limit_s is not None and seconds >= sweep.time_limit_s:
        running = [one for one in unfinished if not one.is_stopped and one.job_id not in stopped]
        if not unfinished:
            return [*effects, _end(sweep, trials, f"{OUT_OF_TIME}; ")]
        return effects + [StopTrial(one.job_id, OUT_OF_TIME) for one in running]
    waiting = [one for one in trials if one.is_interrupted and one.state in _RESUMABLE]
    room = sweep.jobs_at_once - len(unfinished)
    resumed = [ResumeTrial(one.job_id) for one in waiting[: max(0, room)]]
    # A deleted trial is not started again.
    first = 1 + last_started
    last = min(sweep.trials, first + max(0, room - len(resumed)) - 1)
    started = [StartTrial(number) for number in range(first, last + 1)]
    if not unfinished and not resumed and not started:
        return [*effects, _end(sweep, trials)]
    return [*effects, *resumed, *started]


def _judgements(sweep: SweepJob, trials: Sequence[Trial]) -> list[JudgeTrial]:
    """Return the comparisons that can be made now, ordered by rung and then by number of the trial."""
    found: list[JudgeTrial] = []
    over = {one.job_id for one in trials if one.has_lost or (one.is_stopped and not one.is_interrupted)}
    factor = 1 if sweep.early_stopping is None else sweep.early_stopping.factor
    for step in rungs_of(sweep):
        at_rung = [trial.judged[step] for trial in trials if step in trial.judged]
        for trial in trials:
            if (
                step in trial.judged
                or step not in trial.values
                or step >= trial.steps
                or trial.job_id in over
            ):
                continue
            value = trial.values[step]
            kept = is_kept(value, at_rung, factor, is_rising=sweep.is_rising)
            at_rung.append(value)
            place = 1 + sum(other > value if sweep.is_rising else other < value for other in at_rung)
            reason = (
                f"{sweep.metric} {value:.4g} at step {step} is number {place} of {len(at_rung)} trials so far"
            )
            found.append(JudgeTrial(trial.job_id, step, value, kept, reason))
            if not kept:
                over.add(trial.job_id)
    return found


def _end(sweep: SweepJob, trials: Sequence[Trial], why: str = "") -> FinishSweep:
    if any(trial.has_result for trial in trials):
        return FinishSweep(JobState.succeeded, why + _count(trials, sweep))
    return FinishSweep(JobState.failed, f"{why}no trial has a value of {sweep.metric}")


def _count(trials: Sequence[Trial], sweep: SweepJob) -> str:
    ended = sum(trial.state is JobState.succeeded for trial in trials)
    stopped = sum(trial.is_stopped and trial.state is JobState.cancelled for trial in trials)
    failed = sum(trial.state is JobState.failed for trial in trials)
    parts = [f"{ended} of {sweep.trials} trials ran to their end"]
    parts += [f"{stopped} were stopped"] if stopped else []
    parts += [f"{failed} failed"] if failed else []
    return ", ".join(parts)
