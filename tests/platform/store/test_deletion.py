"""Deletion of finished jobs and deployments: rows first, then files. Data in use is never deleted."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from tests.databases import Clock

from share_compute.errors import Conflict, NotFound
from share_compute.lifecycle.attempt_events import (
    ArtifactSaved,
    AttemptEnded,
    CheckpointSaved,
    Planned,
    StepCommitted,
)
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.planning.plan import Plan
from share_compute.specification import parse_deployment, parse_job
from share_compute.store import Store
from share_compute.store.retention import Keep

JOB = parse_job({"model": {"layers": [{"type": "relu"}]}, "data": {"dataset": "digits"}})
PLAN = Plan(epoch=0, strategy="uniform", num_layers=1, parameters=1, stages=(), microbatches=1)


def run(store: Store, folder: Path, *, ends: bool = True) -> str:
    """Return a job with an event, a metric, a checkpoint and an artifact."""
    job = store.jobs.create(JOB)
    place = folder / "jobs" / job.id
    for made in ("checkpoints/step-00000001", "artifacts/model"):
        (place / made).mkdir(parents=True)
        (place / made / "weights").write_bytes(b"1234")
    store.jobs.begin(job.id, [])
    step = StepCommitted(
        step=1,
        loss=1.0,
        learning_rate=0.1,
        gradient_norm=None,
        samples=1,
        tokens=1,
        seconds=1.0,
        tokens_per_s=1.0,
    )
    store.progress.record(
        job.id,
        1,
        [
            Planned(plan=PLAN),
            step,
            CheckpointSaved(step=1, path=place / "checkpoints/step-00000001", size_bytes=4),
            ArtifactSaved(name="model", path=place / "artifacts/model", size_bytes=4),
            *([AttemptEnded(outcome="succeeded", reason="done")] if ends else []),
        ],
    )
    return job.id


def test_a_job_that_is_over_goes_with_all_its_rows(store: Store, tmp_path: Path) -> None:
    job_id, other = run(store, tmp_path), run(store, tmp_path)
    assert store.deletions.job(job_id, tmp_path)
    for gone in (store.jobs.get, store.progress.metrics, store.progress.artifacts, store.progress.timings):
        with pytest.raises(NotFound):
            gone(job_id)
    assert {event.job_id for event in store.events.after(0)} == {other, None}
    last = store.events.after(store.events.last_seq() - 1)[0]
    assert (last.kind, last.data) == ("deleted", {"job": job_id, "name": JOB.name})
    assert len(store.progress.metrics(other)) == 1
    # The files still exist, and the store lists them until their removal is reported.
    assert store.deletions.folders() == [tmp_path / "jobs" / job_id]
    store.deletions.removed(tmp_path / "jobs" / job_id)
    assert store.deletions.folders() == []
    with pytest.raises(NotFound):
        store.deletions.job(job_id, tmp_path)


def test_a_job_that_runs_is_deleted_when_it_ended(store: Store, tmp_path: Path) -> None:
    job_id = run(store, tmp_path, ends=False)
    with pytest.raises(Conflict, match="only jobs that are over can be deleted") as refused:
        store.deletions.job(job_id, tmp_path)
    assert "--cancel" in (refused.value.hint or "")
    assert not store.deletions.job(job_id, tmp_path, cancel=True)
    assert store.jobs.get(job_id).cancel_requested_at is not None
    assert store.deletions.due() == []
    store.progress.record(job_id, 1, [AttemptEnded(outcome="cancelled", reason="on request")])
    assert store.deletions.due() == [job_id]
    assert store.deletions.job(job_id, tmp_path)
    assert store.deletions.due() == []


def test_a_job_that_waits_is_cancelled_and_deleted_at_once(store: Store, tmp_path: Path) -> None:
    job = store.jobs.create(JOB)
    assert store.deletions.job(job.id, tmp_path, cancel=True)
    with pytest.raises(NotFound):
        store.jobs.get(job.id)


def test_what_a_deployment_serves_stays_until_it_is_down(store: Store, tmp_path: Path) -> None:
    job_id = run(store, tmp_path)
    by_job = parse_deployment({"name": "by-job", "model": {"job": job_id}})
    by_path = parse_deployment(
        {"name": "by-path", "model": {"path": str(tmp_path / "jobs" / job_id / "artifacts/model")}}
    )
    for spec in (by_job, by_path):
        deployment = store.deployments.create(spec, reason="asked for")
        for delete in (
            lambda: store.deletions.job(job_id, tmp_path),
            lambda: store.deletions.artifact(job_id, "model"),
        ):
            with pytest.raises(Conflict, match=f"deployment {spec.name} uses"):
                delete()
        with pytest.raises(Conflict, match="only one that is over can be forgotten"):
            store.deletions.deployment(spec.name)
        store.deployments.stop(spec.name)
        store.deletions.deployment(deployment.id)
        with pytest.raises(NotFound):
            store.deployments.get(deployment.id)
    assert [event.kind for event in store.events.after(0) if event.kind == "deployment"] == []
    store.deletions.artifact(job_id, "model")
    assert store.progress.artifacts(job_id) == []
    assert store.deletions.folders() == [tmp_path / "jobs" / job_id / "artifacts/model"]


@pytest.mark.parametrize(
    ("name", "folder"), [("model", "artifacts/model"), ("step-5", "exports/step-5/model")]
)
def test_an_artifact_that_was_made_again_is_not_removed(
    store: Store, tmp_path: Path, name: str, folder: str
) -> None:
    job_id = run(store, tmp_path)
    saved = ArtifactSaved(name=name, path=tmp_path / "jobs" / job_id / folder, size_bytes=4)
    store.progress.add_artifact(job_id, saved)
    store.deletions.artifact(job_id, name)
    assert len(store.deletions.folders()) == 1
    store.progress.add_artifact(job_id, saved)
    assert store.deletions.folders() == []


# -- retention ---------------------------------------------------------------------------------------------------------


def test_nothing_is_pruned_unless_somebody_wants_it(store: Store, clock: Clock, tmp_path: Path) -> None:
    run(store, tmp_path)
    clock.now += timedelta(days=10_000)
    assert store.retention.prune(Keep(), tmp_path) == []


def test_pruning_finds_what_is_old_and_deletes_just_that(store: Store, clock: Clock, tmp_path: Path) -> None:
    old = run(store, tmp_path)
    unfinished = run(store, tmp_path, ends=False)
    clock.now += timedelta(days=30)
    new = run(store, tmp_path)
    keep = Keep(artifacts_days=20, checkpoints_days=20, metrics_days=20, events_days=20)
    found = store.retention.find(keep, tmp_path)
    assert [(one.kind, one.job_id, one.rows) for one in found[:-1]] == [
        ("artifact", old, 1),
        ("checkpoints", old, 0),
        ("metrics", old, 1),
    ]
    num_events = len(store.events.after(0, job_id=old))
    assert (found[-1].kind, found[-1].rows) == ("events", num_events)
    assert store.progress.artifacts(old), "a dry run deletes nothing"
    assert store.retention.prune(keep, tmp_path) == found
    assert store.progress.artifacts(old) == store.progress.metrics(old) == []
    assert store.jobs.get(old).checkpoint_path is None
    assert store.events.after(0, job_id=old) == []
    for job_id in (unfinished, new):
        assert store.progress.artifacts(job_id)
        assert store.progress.metrics(job_id)
        assert store.events.after(0, job_id=job_id)
    assert sorted(store.deletions.folders()) == [
        tmp_path / "jobs" / old / "artifacts/model",
        tmp_path / "jobs" / old / "checkpoints",
    ]
    (whole,) = store.retention.prune(Keep(jobs_days=20), tmp_path)
    assert (whole.kind, whole.job_id, whole.folder) == ("job", old, tmp_path / "jobs" / old)
    with pytest.raises(NotFound):
        store.jobs.get(old)


def test_what_is_used_is_not_pruned(store: Store, clock: Clock, tmp_path: Path) -> None:
    job_id = run(store, tmp_path)
    spec = parse_deployment({"name": "served", "model": {"job": job_id}})
    deployment = store.deployments.create(spec, reason="asked for")
    clock.now += timedelta(days=30)
    keep = Keep(jobs_days=1, artifacts_days=1, checkpoints_days=1, events_days=1)
    assert [one.kind for one in store.retention.prune(keep, tmp_path)] == ["events"]
    assert store.jobs.get(job_id)
    # Events of a deployment are kept while it is up.
    assert [event.kind for event in store.events.after(0)] == ["deployment"]
    store.deployments.set_state(deployment.id, DeploymentState.stopped, "down")
    assert {one.kind for one in store.retention.prune(keep, tmp_path)} == {"job", "events"}


def test_events_go_in_pieces(
    store: Store, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("share_compute.store.retention.ROWS_AT_ONCE", 7)
    for number in range(50):
        store.events.record("alert", {"number": number})
    clock.now += timedelta(days=2)
    store.events.record("alert", {"number": 50})
    (found,) = store.retention.prune(Keep(events_days=1), tmp_path)
    assert found.rows == 50
    assert [event.data["number"] for event in store.events.after(0)] == [50]
