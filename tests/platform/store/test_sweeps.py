"""Sweeps in the store: each decision is one transaction, and trials belong to their sweep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.databases import Clock, reading

from share_compute.errors import Conflict, NotFound
from share_compute.lifecycle.attempt_events import AttemptEnded, Validated
from share_compute.lifecycle.states import JobState
from share_compute.specification import SweepJob, parse_any_job, trial_job
from share_compute.store import JobRecord, RungRecord, Store
from share_compute.store.deletion import user_of
from share_compute.store.retention import Keep

RATE = "training.optimizer.learning_rate"


def spec(**changes: Any) -> SweepJob:
    made = parse_any_job(
        {
            "kind": "sweep",
            "name": "rates",
            "job": {
                "model": {"layers": [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]},
                "data": {"dataset": "digits"},
                "training": {"steps": 20, "validate_every": 5},
            },
            "fields": {RATE: {"values": [0.1, 0.01, 0.001]}},
            **changes,
        }
    )
    assert isinstance(made, SweepJob)
    return made


def begun(store: Store, owner: str | None = None) -> JobRecord:
    return store.sweeps.begin(store.jobs.create(spec(), owner=owner).id)


def started(store: Store, sweep: JobRecord, number: int) -> JobRecord:
    return store.sweeps.start(sweep.id, number, trial_job(sweep.sweep, number, sweep.id))


def run(store: Store, job: JobRecord) -> None:
    store.jobs.begin(job.id, [])
    store.jobs.move(job.id, JobState.running, "running", attempt=job.attempt)


def end(store: Store, job: JobRecord, outcome: Any = "succeeded") -> None:
    store.progress.record(job.id, job.attempt, [AttemptEnded(outcome=outcome, reason="over")])


def test_a_sweep_runs_its_trials_as_jobs_of_its_owner(store: Store) -> None:
    sweep = store.jobs.create(spec(), owner="key-1")
    assert (sweep.kind, sweep.state, sweep.total_steps) == ("sweep", JobState.queued, 3)
    assert [one.id for one in store.sweeps.active()] == [sweep.id]
    sweep = store.sweeps.begin(sweep.id)
    assert (sweep.state, sweep.reason) == (JobState.running, "3 trials")
    assert sweep.started_at is not None
    job = started(store, sweep, 1)
    assert (job.kind, job.owner, job.name, job.group) == ("train", "key-1", "rates 1", sweep.id)
    assert (job.sweep_id, job.state, job.reason) == (sweep.id, JobState.queued, f"trial 1 of {sweep.id}")
    assert job.trial is not None
    assert job.trial.settings == {RATE: 0.1}
    with pytest.raises(Conflict, match="has started trial 1 already"):
        started(store, sweep, 1)
    assert [one.id for one in store.sweeps.trials(sweep.id)] == [job.id]
    run(store, job)
    end(store, job)
    for _ in range(2):
        store.sweeps.count(sweep.id)
    assert store.jobs.get(sweep.id).step == 1
    counted = [one.data for one in store.events.after(0, job_id=sweep.id) if one.kind == "trials"]
    assert counted == [{"done": 1, "total": 3}]
    store.sweeps.finish(sweep.id, JobState.succeeded, "all trials are over")
    assert store.sweeps.active() == []
    with pytest.raises(Conflict, match="starts no trials now"):
        started(store, sweep, 2)
    events = [one.data for one in store.events.after(0, job_id=sweep.id) if one.kind == "trial"]
    assert [(one["number"], one["what"], one["job"]) for one in events] == [(1, "started", job.id)]


def test_values_are_those_of_the_validations(store: Store) -> None:
    sweep = begun(store)
    first, second = started(store, sweep, 1), started(store, sweep, 2)
    run(store, first)
    measured = [
        Validated(split="validation", step=step, loss=loss, accuracy=1 - loss)
        for step, loss in ((5, 0.5), (10, 0.25))
    ]
    store.progress.record(first.id, 1, measured)
    assert store.sweeps.values(sweep.id, "loss", [5, 20]) == {first.id: {5: 0.5}}
    assert store.sweeps.last_values(sweep.id, "accuracy") == {first.id: (10, 0.75)}
    assert store.sweeps.last_values(sweep.id, "rmse") == {}
    assert second.id not in store.sweeps.last_values(sweep.id, "loss")


def test_a_comparison_is_recorded_once_and_stops_a_bad_trial(store: Store) -> None:
    sweep = begun(store)
    good, bad = started(store, sweep, 1), started(store, sweep, 2)
    run(store, bad)
    store.sweeps.judge(sweep.id, good.id, RungRecord(step=5, value=1.0, is_kept=True), "best")
    worse = RungRecord(step=5, value=2.0, is_kept=False)
    store.sweeps.judge(sweep.id, bad.id, worse, "number 2 of 2")
    store.sweeps.judge(sweep.id, bad.id, worse, "again")
    found = store.jobs.get(bad.id)
    assert found.cancel_requested_at is not None
    assert found.trial is not None
    assert (found.trial.rungs, found.trial.stopped) == ((worse,), "number 2 of 2")
    kept = store.jobs.get(good.id)
    assert kept.trial is not None
    assert (kept.trial.stopped, kept.cancel_requested_at) == (None, None)
    # A trial that is over cannot be stopped.
    end(store, bad, "cancelled")
    store.sweeps.stop(sweep.id, bad.id, "late", is_interrupted=True)
    over = store.jobs.get(bad.id).trial
    assert over is not None
    assert over.stopped == "number 2 of 2"


def test_a_cancelled_sweep_continues_with_its_trials(store: Store) -> None:
    sweep = begun(store)
    job = started(store, sweep, 1)
    store.jobs.cancel(sweep.id)
    with pytest.raises(Conflict, match="starts no trials now"):
        started(store, sweep, 2)
    store.sweeps.stop(sweep.id, job.id, "the sweep was cancelled", is_interrupted=True)
    assert store.jobs.get(job.id).state is JobState.cancelled
    store.sweeps.finish(sweep.id, JobState.cancelled, "cancelled")
    assert store.jobs.get(sweep.id).step == 0
    again = store.jobs.resume(sweep.id)
    assert (again.state, again.reason) == (JobState.queued, "resumed; continuing from its trials")
    store.sweeps.begin(sweep.id)
    resumed = store.sweeps.resume(sweep.id, job.id)
    assert resumed.state is JobState.queued
    assert resumed.trial is not None
    assert (resumed.trial.stopped, resumed.trial.is_interrupted) == (None, False)


def test_a_trial_that_ends_well_or_is_resumed_by_hand_does_not_wait_for_its_sweep(store: Store) -> None:
    sweep = begun(store)
    last_step, by_hand = started(store, sweep, 1), started(store, sweep, 2)
    for job in (last_step, by_hand):
        run(store, job)
    store.jobs.cancel(sweep.id)
    for job in (last_step, by_hand):
        store.sweeps.stop(sweep.id, job.id, "the sweep was cancelled", is_interrupted=True)
    end(store, last_step)
    end(store, by_hand, "cancelled")
    assert [one.trial.is_interrupted for one in store.sweeps.trials(sweep.id)] == [False, True]
    store.jobs.resume(by_hand.id)
    assert [one.trial.stopped for one in store.sweeps.trials(sweep.id)] == [None, None]
    store.sweeps.finish(sweep.id, JobState.cancelled, "cancelled")
    assert store.jobs.get(sweep.id).step == 1


def test_only_the_time_in_which_a_sweep_runs_counts(
    open_store: Callable[[], Store], clock: Clock, tmp_path: Path
) -> None:
    store = open_store()
    sweep = begun(store)
    job = started(store, sweep, 1)
    clock.pass_s(50)
    assert store.sweeps.progress(sweep.id).seconds(clock()) == 50
    store.jobs.cancel(sweep.id)
    store.jobs.cancel(job.id)
    store.sweeps.finish(sweep.id, JobState.cancelled, "cancelled")
    clock.pass_s(86400)
    assert store.deletions.job(job.id, tmp_path)
    store.jobs.resume(sweep.id)
    store.sweeps.begin(sweep.id)
    clock.pass_s(5)
    found = store.sweeps.progress(sweep.id)
    # A trial that was deleted meanwhile is not started again.
    assert (found.seconds(clock()), found.last_started) == (55, 1)
    with pytest.raises(Conflict, match="has started trial 1 already"):
        started(store, sweep, 1)


def test_a_sweep_is_deleted_with_its_trials(store: Store, tmp_path: Path) -> None:
    sweep = begun(store)
    job, other = started(store, sweep, 1), started(store, sweep, 2)
    store.jobs.cancel(other.id)
    with reading(store) as session:
        assert user_of(session, other.id) == f"sweep {sweep.id}"
        assert user_of(session, sweep.id) == f"job {job.id}"
    with pytest.raises(Conflict, match=f"sweep {sweep.id} uses"):
        store.deletions.job(other.id, tmp_path)
    assert not store.deletions.job(sweep.id, tmp_path, cancel=True)
    store.jobs.cancel(job.id)
    store.sweeps.finish(sweep.id, JobState.cancelled, "cancelled")
    assert store.deletions.due() == [sweep.id]
    assert store.deletions.job(sweep.id, tmp_path)
    for one in (sweep, job, other):
        with pytest.raises(NotFound):
            store.jobs.get(one.id)
    assert {folder.name for folder in store.deletions.folders()} == {sweep.id, job.id, other.id}


def test_trials_are_kept_as_long_as_their_sweep(
    open_store: Callable[[], Store], tmp_path: Path, clock: Clock
) -> None:
    store = open_store()
    sweep = begun(store)
    job = started(store, sweep, 1)
    store.jobs.cancel(job.id)
    clock.pass_s(10 * 86400)
    assert store.retention.prune(Keep(jobs_days=1), tmp_path) == []
    store.sweeps.finish(sweep.id, JobState.cancelled, "cancelled")
    clock.pass_s(10 * 86400)
    pruned = store.retention.prune(Keep(jobs_days=1), tmp_path)
    assert sweep.id in {one.job_id for one in pruned}
    with pytest.raises(NotFound):
        store.jobs.get(job.id)
