"""Decisions of sweeps: early stopping, the budget, and the end."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from share_compute.lifecycle.states import JobState
from share_compute.lifecycle.sweeps import (
    CANCELLED,
    OUT_OF_TIME,
    FinishSweep,
    JudgeTrial,
    ResumeTrial,
    StartTrial,
    StopTrial,
    Trial,
    decide,
    is_kept,
    rungs_of,
)
from share_compute.specification import SweepJob, parse_any_job

DIGITS = {
    "model": {"layers": [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]},
    "data": {"dataset": "digits"},
    "training": {"steps": 100, "validate_every": 5},
}


def sweep(**changes: Any) -> SweepJob:
    spec = parse_any_job(
        {
            "kind": "sweep",
            "job": DIGITS,
            "fields": {"training.optimizer.learning_rate": {"values": [0.1, 0.2, 0.3, 0.4]}},
            "jobs_at_once": 2,
            **changes,
        }
    )
    assert isinstance(spec, SweepJob)
    return spec


HALVING = {"early_stopping": {"first": 10, "factor": 3}}


def trial(number: int, state: JobState = JobState.running, **changes: Any) -> Trial:
    made = Trial(number, f"job-{number}", state, 100, judged={}, values={})
    return replace(made, **changes)


def decided(
    spec: SweepJob,
    *trials: Trial,
    last_started: int | None = None,
    seconds: float = 0.0,
    is_cancelled: bool = False,
) -> list[Any]:
    last = max((one.number for one in trials), default=0) if last_started is None else last_started
    return decide(spec, trials, last_started=last, seconds=seconds, is_cancelled=is_cancelled)


def test_one_trial_in_three_continues() -> None:
    assert is_kept(5.0, [], 3, is_rising=False)
    assert not is_kept(5.0, [4.0], 3, is_rising=False)
    assert is_kept(5.0, [4.0], 3, is_rising=True)
    assert is_kept(4.5, [4.0, 5.0, 6.0, 7.0, 8.0], 3, is_rising=False)
    assert not is_kept(5.5, [4.0, 5.0, 6.0, 7.0, 8.0], 3, is_rising=False)
    assert is_kept(4.0, [4.0, 4.0], 3, is_rising=False)


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_about_one_trial_in_factor_is_kept_of_many(factor: int) -> None:
    source, before, kept = random.Random(factor), list[float](), 0
    for _ in range(2000):
        value = source.random()
        kept += is_kept(value, before, factor, is_rising=True)
        before.append(value)
    assert kept / 2000 == pytest.approx(1 / factor, abs=0.04)


def test_rungs_grow_by_the_factor() -> None:
    spec = sweep(**HALVING)
    assert rungs_of(spec)[:4] == (10, 30, 90, 270)
    assert spec.early_stopping is not None
    assert spec.early_stopping.rungs(100) == (10, 30, 90)
    assert rungs_of(sweep()) == ()


def test_trials_start_within_the_budget() -> None:
    spec = sweep()
    assert decided(spec) == [StartTrial(1), StartTrial(2)]
    assert decided(spec, trial(1), trial(2)) == []
    assert decided(spec, trial(1, JobState.failed), trial(2)) == [StartTrial(3)]
    # A trial that was asked to stop keeps its machines until it is over, and a deleted one is not started again.
    assert decided(spec, trial(2, is_stopped=True), trial(3)) == []
    assert decided(spec, trial(3, JobState.succeeded)) == [StartTrial(4)]
    assert decided(spec, trial(1), last_started=3) == [StartTrial(4)]


def test_a_trial_that_is_worse_stops_at_its_rung() -> None:
    spec = sweep(**HALVING)
    first, second = trial(1, values={10: 1.0}), trial(2, values={10: 2.0})
    kept, stopped = decided(spec, first, second)
    assert kept == JudgeTrial("job-1", 10, 1.0, is_kept=True, reason=kept.reason)
    assert stopped == JudgeTrial("job-2", 10, 2.0, is_kept=False, reason=stopped.reason)
    assert stopped.reason == "validation_loss 2 at step 10 is number 2 of 2 trials so far"
    # A comparison is made once.
    judged = replace(first, judged={10: 1.0}), replace(second, judged={10: 2.0}, is_stopped=True)
    assert decided(spec, *judged) == []
    over = replace(judged[1], state=JobState.cancelled)
    assert decided(spec, judged[0], over) == [StartTrial(3)]
    # A value at a later rung is compared with values there only; a stopped trial is not compared again.
    later = decided(spec, replace(judged[0], values={10: 1.0, 30: 9.0}), replace(over, values={30: 0.5}))
    assert [one for one in later if isinstance(one, JudgeTrial)] == [
        JudgeTrial(
            "job-1",
            30,
            9.0,
            is_kept=True,
            reason="validation_loss 9 at step 30 is number 1 of 1 trials so far",
        )
    ]


def test_a_metric_that_rises_is_compared_the_other_way() -> None:
    spec = sweep(**HALVING, metric="accuracy")
    found = decided(spec, trial(1, values={10: 0.5}), trial(2, values={10: 0.9}))
    assert [one.is_kept for one in found] == [True, True]
    found = decided(spec, trial(1, values={10: 0.9}), trial(2, values={10: 0.5}))
    assert [one.is_kept for one in found] == [True, False]
    assert sweep(metric="accuracy", goal="min").is_rising is False


def test_a_trial_at_its_last_step_is_not_stopped() -> None:
    spec = sweep(**HALVING)
    short = trial(2, steps=10, values={10: 2.0})
    assert [one.job_id for one in decided(spec, trial(1, values={10: 1.0}), short)] == ["job-1"]


def test_cancelling_stops_all_trials_first() -> None:
    spec = sweep()
    running = trial(1), trial(2, is_stopped=True), trial(3, JobState.succeeded)
    assert decided(spec, *running, is_cancelled=True) == [StopTrial("job-1", CANCELLED, is_interrupted=True)]
    over = trial(1, JobState.cancelled, is_stopped=True, is_interrupted=True), trial(3, JobState.succeeded)
    (end,) = decided(spec, *over, is_cancelled=True)
    assert end.state is JobState.cancelled
    assert decided(spec, *over) == [ResumeTrial("job-1"), StartTrial(4)]


@pytest.mark.parametrize("state", [JobState.queued, JobState.running, JobState.succeeded])
def test_only_trials_that_can_be_resumed_are_waited_for(state: JobState) -> None:
    spec = sweep(jobs_at_once=1)
    interrupted = trial(4, state, is_interrupted=True, has_result=True)
    assert not [one for one in decided(spec, interrupted) if isinstance(one, ResumeTrial)]
    if state.is_final:
        (end,) = decided(spec, interrupted)
        assert isinstance(end, FinishSweep)


def test_a_trial_that_was_resumed_by_hand_is_stopped_but_not_compared_again() -> None:
    spec = sweep(**HALVING, time_limit_s=60)
    again = trial(4, judged={10: 2.0}, values={10: 2.0, 30: 9.0}, has_lost=True)
    assert decided(spec, trial(1), again) == []
    assert decided(spec, again, is_cancelled=True) == [StopTrial("job-4", CANCELLED, is_interrupted=True)]
    assert decided(spec, again, seconds=60) == [StopTrial("job-4", OUT_OF_TIME)]


def test_the_time_limit_stops_running_trials_and_ends_the_sweep() -> None:
    spec = sweep(time_limit_s=60)
    assert decided(spec, trial(1), seconds=59) == [StartTrial(2)]
    assert decided(spec, trial(1), seconds=60) == [StopTrial("job-1", OUT_OF_TIME)]
    (end,) = decided(spec, trial(1, JobState.cancelled, is_stopped=True, has_result=True), seconds=61)
    assert end == FinishSweep(
        JobState.succeeded, f"{OUT_OF_TIME}; 0 of 4 trials ran to their end, 1 were stopped"
    )


def test_a_sweep_without_any_value_fails() -> None:
    spec = sweep()
    failed = [trial(number, JobState.failed) for number in range(1, 5)]
    assert decided(spec, *failed) == [FinishSweep(JobState.failed, "no trial has a value of validation_loss")]
    (end,) = decided(spec, *failed[:3], trial(4, JobState.succeeded, has_result=True))
    assert end == FinishSweep(JobState.succeeded, "1 of 4 trials ran to their end, 3 failed")
