"""Sweeps on a real control plane, without machines: the tests report what attempts of the trials would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.api.conftest import Plane, wait_until

from share_compute.errors import UserError
from share_compute.lifecycle.attempt_events import AttemptEnded, Validated
from share_compute.lifecycle.states import JobState
from share_compute.scopes import Scope
from share_compute.specification import parse_job
from share_compute.store import JobRecord, TrialJobRecord
from share_compute_api.client.client import Client

RATE = "training.optimizer.learning_rate"


@pytest.fixture
def rates(digits: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "sweep",
        "name": "rates",
        "job": {**digits, "training": {"steps": 20, "validate_every": 5}},
        "fields": {RATE: {"values": [0.1, 0.01, 0.001, 0.0001]}},
        "early_stopping": {"first": 5, "factor": 2},
        "jobs_at_once": 2,
    }


def trials(plane: Plane, sweep: JobRecord, count: int) -> list[TrialJobRecord]:
    """Return the trials as soon as there are this many."""
    wait_until(lambda: len(plane.store.sweeps.trials(sweep.id)) == count)
    return plane.store.sweeps.trials(sweep.id)


def begin(plane: Plane, job: TrialJobRecord) -> None:
    plane.store.jobs.begin(job.id, [])
    plane.store.jobs.move(job.id, JobState.running, "running", attempt=job.attempt)


def validate(plane: Plane, job: TrialJobRecord, step: int, loss: float) -> None:
    measured = Validated(split="validation", step=step, loss=loss, accuracy=1 - loss)
    plane.store.progress.record(job.id, job.attempt, [measured])


def end(plane: Plane, job: TrialJobRecord, outcome: Any = "succeeded") -> None:
    plane.store.progress.record(job.id, job.attempt, [AttemptEnded(outcome=outcome, reason="over")])


def is_asked_to_stop(plane: Plane, job: TrialJobRecord) -> bool:
    return plane.store.jobs.get(job.id).cancel_requested_at is not None


@pytest.mark.slow
def test_a_sweep_compares_its_trials_across_a_restart(
    plane: Plane, client: Client, rates: dict[str, Any], run: Any
) -> None:
    sweep = client.submit(rates)
    first, second = trials(plane, sweep, 2)
    for job in (first, second):
        begin(plane, job)
    validate(plane, first, 5, 0.5)
    validate(plane, second, 5, 0.6)
    wait_until(lambda: is_asked_to_stop(plane, second))
    assert not is_asked_to_stop(plane, first)

    def meanwhile() -> None:
        end(plane, second, "cancelled")
        validate(plane, first, 20, 0.3)
        end(plane, first)

    plane.restart(meanwhile)
    *_, third, fourth = trials(plane, sweep, 4)
    for job in (third, fourth):
        begin(plane, job)
    validate(plane, third, 5, 0.4)
    validate(plane, third, 20, 0.2)
    end(plane, third)
    end(plane, fourth, "failed")
    wait_until(lambda: client.job(sweep.id).state.is_final)
    over = client.job(sweep.id)
    assert (over.state, over.step) == (JobState.succeeded, 4)
    assert over.reason == "2 of 4 trials ran to their end, 1 were stopped, 1 failed"

    view = client.trials(sweep.id)
    assert [one.number for one in view.trials] == [3, 1, 2, 4]
    assert (view.metric, view.goal, view.fields, view.best) == ("validation_loss", "min", [RATE], 3)
    assert view.trials[2].is_stopped
    assert view.trials[2].reason == "validation_loss 0.6 at step 5 is number 2 of 2 trials so far"
    assert [(rung.step, rung.is_kept) for rung in view.trials[0].rungs] == [(5, True)]

    shown = run("show", sweep.id, COLUMNS="80").stdout
    assert "4 of 4 are over" in shown
    assert shown.index(third.id) < shown.index(first.id) < shown.index(second.id)
    assert max(map(len, shown.splitlines())) <= 80
    assert json.loads(run("show", sweep.id, "--json").stdout)["trials"]["best"] == 3
    best = parse_job(run("show", sweep.id, "--best").stdout)
    assert best.training.optimizer.learning_rate == 0.001
    assert (best.group, best.training.steps) == (None, 20)
    assert f"trial 1 started: {first.id}, {RATE} = 0.1" in run("logs", sweep.id).stdout
    assert "4/4 trials" in run("jobs").stdout
    assert client.compare([first.id, third.id]).differences[0].field == RATE
    trials_of_it = [fourth.id, third.id, second.id, first.id]
    assert [one.id for one in client.jobs(group=sweep.id).jobs] == trials_of_it
    assert [one.id for one in client.jobs().jobs] == [sweep.id]
    assert [one.id for one in client.jobs(trials=True).jobs] == [*trials_of_it, sweep.id]
    assert first.id not in run("jobs").stdout
    assert first.id in run("jobs", "--trials").stdout


def test_cancelling_and_resuming_a_sweep(plane: Plane, client: Client, rates: dict[str, Any]) -> None:
    sweep = client.submit(rates)
    first, second = trials(plane, sweep, 2)
    begin(plane, first)
    client.cancel(sweep.id)
    wait_until(lambda: is_asked_to_stop(plane, first))
    wait_until(lambda: client.job(second.id).state is JobState.cancelled)
    assert client.job(sweep.id).state is JobState.running
    end(plane, first, "cancelled")
    wait_until(lambda: client.job(sweep.id).state is JobState.cancelled)
    client.resume(sweep.id)
    wait_until(lambda: client.job(second.id).state is JobState.queued)
    assert client.job(first.id).state is JobState.queued
    assert len(plane.store.sweeps.trials(sweep.id)) == 2
    client.delete_job(sweep.id, cancel=True)
    wait_until(lambda: not plane.store.sweeps.active())


def test_a_trial_that_ends_while_its_sweep_is_cancelled_does_not_block_the_sweep(
    plane: Plane, client: Client, rates: dict[str, Any]
) -> None:
    sweep = client.submit({**rates, "fields": {RATE: {"values": [0.1, 0.01]}}})
    first, second = trials(plane, sweep, 2)
    for job in (first, second):
        begin(plane, job)
    validate(plane, first, 20, 0.5)
    client.cancel(sweep.id)
    wait_until(lambda: is_asked_to_stop(plane, first) and is_asked_to_stop(plane, second))
    end(plane, first)
    end(plane, second, "cancelled")
    wait_until(lambda: client.job(sweep.id).state is JobState.cancelled)
    client.resume(sweep.id)
    wait_until(lambda: client.job(second.id).state is JobState.queued)
    client.cancel(second.id)
    wait_until(lambda: client.job(sweep.id).state.is_final)
    over = client.job(sweep.id)
    assert (over.state, over.reason) == (JobState.succeeded, "1 of 2 trials ran to their end")


def test_trials_have_the_rights_of_the_submitter(plane: Plane, rates: dict[str, Any]) -> None:
    key, secret = plane.store.keys.create("ann", [Scope.submit, Scope.read])
    with Client(plane.url, secret) as ann:
        sweep = ann.submit(rates)
        first, second = trials(plane, sweep, 2)
        assert first.owner == sweep.owner == key.id
        plane.store.keys.revoke(key.id)
        plane.store.jobs.cancel(second.id)
        wait_until(lambda: plane.store.jobs.get(sweep.id).state is JobState.failed)
        over = plane.store.jobs.get(sweep.id)
        assert over.reason == "the API key that submitted the sweep was revoked"
        assert plane.store.jobs.get(first.id).state is JobState.cancelled
        assert len(plane.store.sweeps.trials(sweep.id)) == 2


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"training.optimizer.learning_rat": {"values": [0.1]}}, "did you mean 'learning_rate'"),
        ({"parallelism.strategy": {"values": ["auto", "nonsense"]}}, "trial 2: .*nonsense"),
        ({"training.seed": {"integers": [1, 10**6]}}, "1,000,000 points"),
    ],
)
def test_a_sweep_with_a_wrong_trial_is_refused(
    client: Client, http: httpx.Client, rates: dict[str, Any], fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        client.submit({**rates, "fields": fields})
    checked = http.post("/jobs/check", json={**rates, "fields": fields}).json()
    assert checked["problems"]
    assert client.jobs().jobs == []


def test_a_sweep_reads_only_the_files_of_its_job(client: Client, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine " * 100)
    config = {"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32}
    job = {
        "model": {"config": {**config, "num_hidden_layers": 2, "num_attention_heads": 2}},
        "data": {"files": [str(tmp_path / "mine.txt")]},
        "training": {"steps": 4},
    }
    spec = {"kind": "sweep", "job": job, "fields": {"data.files": {"values": [["/etc/passwd.txt"]]}}}
    with pytest.raises(UserError, match=r"data\.files cannot be searched"):
        client.submit(spec)
    missing = {**job, "data": {"files": [str(tmp_path / "missing.txt")]}}
    with pytest.raises(UserError, match=r"job\.data\.files.*missing\.txt"):
        client.submit({**spec, "job": missing, "fields": {RATE: {"values": [0.1]}}})


@pytest.mark.slow
def test_other_kinds_have_no_trials(
    client: Client, digits: dict[str, Any], http: httpx.Client, run: Any, tmp_path: Path
) -> None:
    job = client.submit(digits)
    assert http.get(f"/jobs/{job.id}/trials").status_code == 409
    assert http.get("/jobs/job-none/trials").status_code == 404
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump({"kind": "sweep", "job": digits, "fields": {RATE: {"values": [0.1]}}}))
    assert run("submit", str(file)).returncode == 0
    assert run("show", client.jobs(kind="sweep").jobs[0].id, "--best").returncode == 4
