"""Links of training jobs: what is started from a result, exactly once, whatever process dies in between."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.databases import reading, writing

from share_compute.errors import Conflict, UserError
from share_compute.lifecycle.attempt_events import AttemptEnded
from share_compute.lifecycle.states import JobState
from share_compute.specification import GenerateJob, ServeJob, TrainJob, parse_job
from share_compute.store import JobRecord, LinkState, Store
from share_compute.store.deletion import user_of
from share_compute.store.jobs import job_row

SERVE = {"name": "poet", "max_seq": 64}
GENERATE = {"data": {"files": ["/srv/rows.jsonl"], "prompt": "q"}, "sampling": {"max_tokens": 4}}


def spec(**then: Any) -> TrainJob:
    return parse_job(
        {
            "name": "poems",
            "model": {"config": {"model_type": "llama", "vocab_size": 300}},
            "data": {"files": ["/srv/poems.txt"]},
            "then": then,
        }
    )


def deployed(job: JobRecord) -> ServeJob:
    assert job.training.then.serve is not None
    return job.training.then.serve.deployment(job.id)


def queued(job: JobRecord, deployment: str | None = None) -> GenerateJob:
    assert job.training.then.generate is not None
    return job.training.then.generate.batch(job.id, deployment)


def ended(store: Store, job: JobRecord, outcome: Any = "succeeded") -> JobRecord:
    store.jobs.begin(job.id, [])
    store.jobs.move(job.id, JobState.running, "running", attempt=store.jobs.get(job.id).attempt)
    over = AttemptEnded(outcome=outcome, reason="over")
    return store.progress.record(job.id, store.jobs.get(job.id).attempt, [over])


def states(store: Store, job: JobRecord) -> list[LinkState]:
    return [link.state for link in store.jobs.get(job.id).links]


def test_links_are_checked_with_the_job() -> None:
    found = spec(serve=SERVE, generate=GENERATE)
    assert found.then.links == ("serve", "generate")
    assert found.without_links().then.links == ()
    with pytest.raises(UserError, match=r"then\.generate.*model|did you mean"):
        spec(generate={**GENERATE, "model": {"job": "job-me"}})  # a chain cannot name its model
    with pytest.raises(UserError, match="then"):
        spec(generate={**GENERATE, "then": {"serve": SERVE}})  # nor go on
    with pytest.raises(UserError, match=r"then\.serve\.name"):
        spec(serve={"name": "two words"})
    layers = [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]
    digits = {"model": {"layers": layers}, "data": {"dataset": "digits"}, "then": {"serve": SERVE}}
    with pytest.raises(UserError, match=r"then\.serve: the result of task image_classification cannot"):
        parse_job(digits)
    tuned = {"model": {"path": "/srv/m"}, "data": {"files": ["/srv/poems.txt"]}, "then": {"serve": SERVE}}
    with pytest.raises(UserError, match=r"then\.serve needs training\.lora\.merge"):
        parse_job({**tuned, "training": {"lora": {"rank": 2}}})
    parse_job({**tuned, "training": {"lora": {"rank": 2, "merge": True}}})


def test_links_take_over_all_options() -> None:
    record = spec(serve={**SERVE, "replicas": "0..2", "dtype": "int8"}, generate=GENERATE)
    assert record.then.serve is not None
    made = record.then.serve.deployment("job-a")
    assert (made.name, made.max_seq, made.dtype, str(made.replicas)) == ("poet", 64, "int8", "0..2")
    assert (made.model.job, made.model.artifact) == ("job-a", "model")
    assert record.then.generate is not None
    batch = record.then.generate.batch("job-a", None)
    assert (batch.model, batch.deployment) == (made.model, None)
    assert (batch.sampling.max_tokens, batch.data.column) == (4, "q")
    assert record.then.generate.batch("job-a", "poet").deployment == "poet"


def test_a_link_starts_once_and_belongs_to_the_submitter(store: Store) -> None:
    key, _ = store.keys.create("ada")
    job = store.jobs.create(spec(serve=SERVE, generate=GENERATE), owner=key.id)
    assert states(store, job) == [LinkState.waiting, LinkState.waiting]
    with pytest.raises(Conflict, match=r"then\.serve of job .* does not wait"):
        store.chains.serve(job.id, deployed(job))  # the job has not succeeded
    assert store.chains.due() == []
    ended(store, job)
    assert [one.id for one in store.chains.due()] == [job.id]
    with ThreadPoolExecutor(4) as threads:
        tries = [threads.submit(store.chains.serve, job.id, deployed(job)) for _ in range(8)]
    assert sum(tried.exception() is None for tried in tries) == 1
    (deployment,) = store.deployments.list()
    assert (deployment.owner, deployment.spec.model.job) == (key.id, job.id)
    store.chains.generate(job.id, queued(job, "poet"))
    with pytest.raises(Conflict):
        store.chains.generate(job.id, queued(job, "poet"))
    batches = [one for one in store.jobs.queued() if one.kind == "generate"]
    assert [(one.owner, one.reason) for one in batches] == [(key.id, f"submitted by {job.id}")]
    assert [link.started for link in store.jobs.get(job.id).links] == [deployment.id, batches[0].id]
    assert store.chains.due() == []
    events = [event.data for event in store.events.after(0, job_id=job.id) if event.kind == "link"]
    assert [(data["link"], data["state"]) for data in events] == [
        ("serve", "started"),
        ("generate", "started"),
    ]


def test_a_name_that_is_taken_changes_nothing(store: Store) -> None:
    job = store.jobs.create(spec(serve=SERVE))
    assert store.chains.job_with_name("poet") == job.id
    ended(store, job)
    taken = store.deployments.create(ServeJob.model_validate({**SERVE, "model": {"path": "/m"}}), reason="")
    with pytest.raises(Conflict, match="poet is up already"):
        store.chains.serve(job.id, deployed(job))
    assert [one.id for one in store.deployments.list()] == [taken.id]
    store.chains.fail(job.id, "serve", "poet is up already", {"code": "conflict", "hint": "free it"})
    (link,) = store.jobs.get(job.id).links
    assert (link.state, link.reason, link.error) == (
        LinkState.failed,
        "poet is up already",
        {"code": "conflict", "hint": "free it"},
    )
    assert store.chains.job_with_name("poet") is None
    store.deployments.stop(taken.id)
    store.jobs.resume(job.id)  # starts failed links again
    assert states(store, job) == [LinkState.waiting]
    store.chains.serve(job.id, deployed(job))
    with pytest.raises(Conflict, match="only failed and cancelled jobs can be resumed"):
        store.jobs.resume(job.id)


def test_links_are_cancelled_with_the_job_and_return_with_it(store: Store) -> None:
    job = store.jobs.create(spec(serve=SERVE))
    store.jobs.cancel(job.id)
    assert states(store, job) == [LinkState.cancelled]
    assert store.chains.job_with_name("poet") is None
    store.jobs.resume(job.id)
    assert states(store, job) == [LinkState.waiting]
    ended(store, job, "failed")
    assert states(store, job) == [LinkState.waiting]
    assert store.chains.due() == []
    store.jobs.resume(job.id)
    ended(store, job)
    assert [one.id for one in store.chains.due()] == [job.id]


def test_a_job_that_succeeds_while_it_stops_starts_nothing(store: Store, tmp_path: Path) -> None:
    def stopped(stop: Callable[[str], object]) -> JobRecord:
        job = store.jobs.create(spec(serve=SERVE))
        store.jobs.begin(job.id, [])
        store.jobs.move(job.id, JobState.running, "running", attempt=1)
        stop(job.id)
        over = AttemptEnded(outcome="succeeded", reason="over")
        return store.progress.record(job.id, 1, [over])

    job = stopped(store.jobs.cancel)
    assert job.state is JobState.succeeded
    assert states(store, job) == [LinkState.cancelled]
    assert store.chains.due() == []
    assert store.chains.job_with_name("poet") is None
    store.jobs.resume(job.id)
    assert states(store, job) == [LinkState.waiting]
    assert [one.id for one in store.chains.due()] == [job.id]
    store.jobs.cancel(job.id)
    assert states(store, job) == [LinkState.cancelled]
    with pytest.raises(Conflict, match=f"job {job.id} has succeeded already"):
        store.jobs.cancel(job.id)

    deleted = stopped(lambda job_id: store.deletions.job(job_id, tmp_path, cancel=True))
    assert states(store, deleted) == [LinkState.cancelled]
    with pytest.raises(Conflict, match="only failed and cancelled jobs can be resumed"):
        store.jobs.resume(deleted.id)


def test_nothing_is_started_from_a_job_that_will_be_deleted(store: Store) -> None:
    job = store.jobs.create(spec(serve=SERVE))
    ended(store, job)
    with writing(store) as session:
        job_row(session, job.id).delete_requested_at = store.jobs.get(job.id).created_at
    assert store.chains.due() == []
    with pytest.raises(Conflict, match="does not wait to be started"):
        store.chains.serve(job.id, deployed(job))


def started(store: Store, job: JobRecord) -> str:
    """Start the link ``serve``; return the id of the deployment."""
    return str(store.chains.serve(job.id, deployed(job)).links[0].started)


def test_the_batch_of_a_link_is_bound_to_the_deployment_of_the_other_link(store: Store) -> None:
    both = store.jobs.create(spec(serve=SERVE, generate=GENERATE))
    alone = store.jobs.create(spec(generate=GENERATE))
    for job in (both, alone):
        ended(store, job)
    deployment = started(store, both)
    batch = str(store.chains.generate(both.id, queued(both, "poet")).links[1].started)
    assert store.chains.deployment_of(batch) == deployment
    batch = str(store.chains.generate(alone.id, queued(alone)).links[0].started)
    assert store.chains.deployment_of(batch) is None


@pytest.mark.parametrize("is_over", [True, False])
def test_a_deployment_that_is_over_is_started_again_with_the_batch(store: Store, *, is_over: bool) -> None:
    job = store.jobs.create(spec(serve=SERVE, generate=GENERATE))
    ended(store, job)
    deployment = started(store, job)
    store.chains.fail(job.id, "generate", "the rows are gone", {"code": "invalid-request"})
    if is_over:
        store.deployments.stop(deployment)
    store.jobs.resume(job.id)
    serve, generate = store.jobs.get(job.id).links
    assert generate.state is LinkState.waiting
    assert (serve.state, serve.started) == (
        (LinkState.waiting, None) if is_over else (LinkState.started, deployment)
    )


def test_a_link_says_why_it_waits(store: Store) -> None:
    job = store.jobs.create(spec(serve=SERVE))
    assert job.links[0].reason == "it starts when the job has succeeded"
    (link,) = ended(store, job).links
    assert link.reason == "the job has succeeded; the link is checked, then it starts"
    for _ in range(3):
        (link,) = store.chains.explain(job.id, "serve", "the server is busy").links
    assert (link.state, link.reason) == (LinkState.waiting, "the server is busy")
    assert len([event for event in store.events.after(0, job_id=job.id) if event.kind == "link"]) == 1
    started(store, job)
    with pytest.raises(Conflict):
        store.chains.explain(job.id, "serve", "the server is busy")


def test_files_of_a_link_are_in_use(store: Store, tmp_path: Path) -> None:
    used = store.jobs.create(spec())
    ended(store, used)
    rows = {"data": {"files": [f"{tmp_path}/{used.id}/rows.jsonl"], "prompt": "q"}}
    user = store.jobs.create(spec(generate=rows))

    def users() -> tuple[str | None, list[str]]:
        with reading(store) as session:
            return user_of(session, used.id), [job.id for job in store.jobs.with_needed_files()]

    assert users() == (f"job {user.id}", [user.id])
    ended(store, user)  # its link is due
    assert users() == (f"job {user.id}", [user.id])
    store.chains.fail(user.id, "generate", "the server is full", {"code": "busy"})
    assert users() == (None, [])
