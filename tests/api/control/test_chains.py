"""Chains on a real control plane: a finished job's result is served and answers rows, also after a crash."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from tests.api.conftest import Plane, wait_until
from tests.api.speaking import make_llama

from share_compute.errors import Busy, Conflict, UserError
from share_compute.lifecycle.attempt_events import ArtifactSaved, AttemptEnded
from share_compute.lifecycle.folders import TRAINING
from share_compute.lifecycle.states import JobState
from share_compute.scopes import Scope
from share_compute.specification import LinkName, ServeJob, parse_job
from share_compute.store import JobRecord, LinkState, Store
from share_compute_actors.machine.confine import Policy
from share_compute_api.client.client import Client
from share_compute_api.connection.notifier import Notifier
from share_compute_api.control.jobs.chains import ChainSupervisor
from share_compute_api.submission.chains import LinkStarter
from share_compute_api.workers.exporting import ExportRequest


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("result"), window=64)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"q": f"row {number}"}) for number in range(3)))
    return file


@pytest.fixture
def poems(tmp_path: Path) -> dict[str, Any]:
    """A training job that passes every check."""
    (tmp_path / "poems.txt").write_text("roses are red " * 200)
    config = {
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    return {"name": "poems", "model": {"config": config}, "data": {"files": [str(tmp_path / "poems.txt")]}}


def finish(plane: Plane, job: JobRecord, result: Path) -> None:
    """Let the job succeed with this result, as an attempt would report."""
    folder = plane.settings.data_folder / TRAINING / job.id / "model"
    shutil.copytree(result, folder)
    store = plane.store
    store.jobs.begin(job.id, [])
    store.jobs.move(job.id, JobState.running, "running", attempt=job.attempt)
    saved = ArtifactSaved(name="model", path=folder, size_bytes=1)
    store.progress.record(job.id, job.attempt, [saved, AttemptEnded(outcome="succeeded", reason="done")])


def starter_of(plane: Plane) -> LinkStarter:
    context = plane.app.state.context
    return LinkStarter(plane.store, context.engines, context.data_roots, context.isolated)


def start_due(plane: Plane) -> None:
    """Make one pass over the jobs with due links, as the server does after its start."""
    asyncio.run(ChainSupervisor(plane.store, starter_of(plane), Notifier()).start_due())


def settled(plane: Plane, job: JobRecord) -> JobRecord:
    store = plane.store
    wait_until(lambda: all(link.state is not LinkState.waiting for link in store.jobs.get(job.id).links))
    return store.jobs.get(job.id)


@pytest.mark.slow
def test_a_result_is_served_and_answers_rows(
    plane: Plane, client: Client, poems: dict[str, Any], result: Path, rows: Path, run: Any
) -> None:
    then = {
        "serve": {"name": "poet", "max_seq": 48},
        "generate": {"data": {"files": [str(rows)], "prompt": "q"}},
    }
    job = client.submit({**poems, "tags": ["verse"], "group": "poetry", "then": then})
    assert "then.serve" in run("show", job.id).stdout
    finish(plane, job, result)
    serve, generate = settled(plane, job).links
    deployment = client.deployment("poet")
    assert (serve.started, deployment.owner, deployment.spec.max_seq) == (deployment.id, job.owner, 48)
    batch = client.job(str(generate.started))
    assert (batch.kind, batch.owner, batch.state) == ("generate", job.owner, JobState.queued)
    assert batch.spec.kind == "generate"
    assert batch.spec.deployment == "poet"
    assert plane.store.chains.deployment_of(batch.id) == deployment.id
    assert (batch.tags, batch.group) == (("verse",), "poetry")
    shown = run("show", job.id).stdout
    assert f"then.serve  started: {deployment.id} was started" in shown
    assert f"then.generate started: {batch.id}" in run("logs", job.id).stdout
    plane.restart()
    start_due(plane)
    assert [one.id for one in plane.store.deployments.list()] == [deployment.id]
    assert [one.id for one in plane.store.jobs.queued()] == [batch.id]


def test_a_server_that_died_starts_the_links_once(
    plane: Plane, client: Client, poems: dict[str, Any], result: Path, rows: Path
) -> None:
    link = {"data": {"files": [str(rows)], "prompt": "q"}, "parallelism": {"avoid": ["gpu=no"]}}
    job = client.submit({**poems, "then": {"generate": link}})
    # The job succeeds just before the server dies.
    plane.restart(lambda: finish(plane, job, result))
    (started,) = settled(plane, job).links
    batch = plane.store.jobs.get(str(started.started))
    assert batch.spec.kind == "generate"
    assert batch.spec.model is not None
    assert batch.spec.model.job == job.id
    assert batch.spec.parallelism.avoid == ("gpu=no",)
    plane.restart()
    start_due(plane)
    assert len([one for one in plane.store.jobs.queued() if one.kind == "generate"]) == 1


class Died(BaseException):
    """The end of a server process."""


class Trying:
    """A starter that is busy at first, and whose process dies right after its first start.

    Args:
        starter: starts links.
        failures: errors that are raised in place of a start, last first.
        ends: errors that are raised after a start.
    """

    def __init__(self, starter: LinkStarter, failures: list[Exception], ends: list[BaseException]) -> None:
        self._starter = starter
        self._failures = failures
        self._ends = ends

    def start(self, job: JobRecord, name: LinkName) -> JobRecord:
        if self._failures:
            raise self._failures.pop()
        started = self._starter.start(job, name)
        if self._ends:
            raise self._ends.pop()
        return started


def test_a_link_waits_for_a_busy_server_and_survives_its_death(
    plane: Plane, client: Client, poems: dict[str, Any], result: Path, rows: Path
) -> None:
    then = {"serve": {"name": "poet"}, "generate": {"data": {"files": [str(rows)], "prompt": "q"}}}
    job = client.submit({**poems, "then": then})

    def live() -> None:
        finish(plane, job, result)
        trying = Trying(starter_of(plane), [RuntimeError("a defect"), Busy("busy", hint="later")], [Died()])
        asyncio.run(play(plane.store, trying, job))

    plane.restart(live)
    assert len(plane.store.deployments.list()) == 1
    assert [one.kind for one in plane.store.jobs.queued()] == ["generate"]


async def play(store: Store, starter: Trying, job: JobRecord) -> None:
    def states() -> list[LinkState]:
        return [link.state for link in store.jobs.get(job.id).links]

    def supervisor() -> ChainSupervisor:
        return ChainSupervisor(store, cast("LinkStarter", starter), Notifier())

    await supervisor().start_due()
    assert states() == [LinkState.waiting, LinkState.waiting]  # the server was busy
    await supervisor().start_due()
    assert states() == [LinkState.failed, LinkState.failed]
    assert store.jobs.get(job.id).links[0].reason == "RuntimeError: a defect"
    store.jobs.resume(job.id)
    with pytest.raises(Died):
        await supervisor().start_due()
    assert states() == [LinkState.started, LinkState.waiting]
    await supervisor().start_due()
    assert states() == [LinkState.started, LinkState.started]


def test_a_failed_link_says_which_and_why(
    plane: Plane, client: Client, poems: dict[str, Any], result: Path, rows: Path, run: Any
) -> None:
    then = {
        "serve": {"name": "poet"},
        "generate": {"data": {"files": [str(rows)], "prompt": "q"}},
    }
    job = client.submit({**poems, "then": then})
    other = client.deploy({"name": "poet", "model": {"path": str(_copy(result, rows.parent / "other"))}})
    finish(plane, job, result)
    serve, generate = settled(plane, job).links
    assert (serve.state, generate.state) == (LinkState.failed, LinkState.failed)
    assert serve.reason == f"a deployment named poet is up already ({other.id}, pending)"
    assert generate.reason == "then.serve failed, whose deployment would answer the rows"
    assert (serve.error or {})["code"] == "conflict"
    again = f"then: share-compute resume {job.id}"
    assert (serve.error or {})["hint"] == f"take it down: share-compute undeploy poet; {again}"
    assert (generate.error or {})["hint"].endswith(again)
    assert client.job(job.id).links == (serve, generate)
    assert client.job(job.id).state is JobState.succeeded
    shown = run("show", job.id).stdout
    assert "then.serve  failed: a deployment named poet is up already" in shown
    client.undeploy("poet")
    client.resume(job.id)
    assert [link.state for link in settled(plane, job).links] == [LinkState.started, LinkState.started]


def test_a_repeated_submission_returns_its_job(
    plane: Plane, client: Client, poems: dict[str, Any], result: Path
) -> None:
    document = {**poems, "then": {"serve": {"name": "poet", "max_seq": 48}}}
    job = client.submit(document, idempotency_key="once")
    assert client.submit(document, idempotency_key="once") == job  # its own link has the name
    finish(plane, job, result)
    settled(plane, job)
    assert client.submit(document, idempotency_key="once").id == job.id  # its own deployment has the name
    assert len(plane.store.deployments.list()) == 1
    with pytest.raises(Conflict, match=f"this Idempotency-Key was used for job {job.id}"):
        client.submit({**document, "name": "other"}, idempotency_key="once")
    with pytest.raises(UserError, match="a deployment poet is up"):
        client.submit(document, idempotency_key="twice")


def _copy(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target))


def test_links_start_with_the_rights_of_the_submitter(
    plane: Plane, poems: dict[str, Any], result: Path
) -> None:
    record, key = plane.store.keys.create("ada", [Scope.submit])
    with Client(plane.url, key) as ada:
        job = ada.submit({**poems, "then": {"serve": {"name": "poet"}}})
    plane.store.keys.revoke(record.id)
    finish(plane, job, result)
    (link,) = settled(plane, job).links
    assert link.state is LinkState.failed
    assert "API key that submitted the job was revoked" in link.reason
    assert (link.error or {})["hint"] == "an admin can serve the result"
    assert plane.store.deployments.list() == []


def test_links_are_checked_at_submission(
    plane: Plane, client: Client, poems: dict[str, Any], result: Path, rows: Path, tmp_path: Path
) -> None:
    def problems(**then: Any) -> str:
        with pytest.raises(UserError) as refused:
            client.submit({**poems, "then": then})
        fields = {one["field"] for one in refused.value.details["fields"]}
        return f"{sorted(fields)} {refused.value.message}"

    client.deploy({"name": "poet", "model": {"path": str(_copy(result, tmp_path / "other"))}})
    assert "['then.serve.name'] then.serve.name: a deployment poet is up" in problems(serve={"name": "poet"})
    too_long = problems(serve={"name": "bard", "max_seq": 4096})
    assert "['then.serve.max_seq']" in too_long
    assert "more than the 64" in too_long
    stages = {"name": "bard", "parallelism": {"stages": 9}}
    assert "['then.serve.parallelism.stages']" in problems(serve=stages)
    # The defaults of the architecture hold for sizes that the configuration leaves out.
    config = poems["model"]["config"]
    sizes = ("num_hidden_layers", "max_position_embeddings")
    short = {"config": {key: value for key, value in config.items() if key not in sizes}}
    wrong = {"name": "bard", "max_seq": 4096, "parallelism": {"stages": 33}}
    with pytest.raises(UserError, match="4096 tokens are more than the 2048"):
        client.submit({**poems, "model": short, "then": {"serve": wrong}})
    with pytest.raises(UserError, match=r"then\.serve\.parallelism\.stages: 33 stages .* 32 layers"):
        client.submit({**poems, "model": short, "then": {"serve": {**wrong, "max_seq": 2048}}})
    with pytest.raises(UserError, match=r"^parallelism\.stages: 33 stages cannot share 32 layers"):
        client.submit({**poems, "model": short, "parallelism": {"stages": 33}})
    missing = {"data": {"files": [str(tmp_path / "none.jsonl")], "prompt": "q"}}
    assert "then.generate.data.files" in problems(generate=missing)
    column = {"data": {"files": [str(rows)], "prompt": "question"}}
    assert "then.generate.data" in problems(generate=column)
    outside = {"data": {"files": ["/etc/rows.jsonl"], "prompt": "q"}}
    assert "then.generate.data.files" in problems(generate=outside)
    client.submit({**poems, "then": {"serve": {"name": "bard"}}})
    assert "will serve its result as bard" in problems(serve={"name": "bard"})
    assert client.jobs().jobs[0].spec.kind == "train"
    _, key = plane.store.keys.create("eve", [Scope.read])
    job = client.submit({**poems, "then": {"generate": {"data": {"files": [str(rows)], "prompt": "q"}}}})
    with Client(plane.url, key) as eve:
        assert str(tmp_path) not in eve.job(job.id).model_dump_json()


def test_no_other_deployment_of_the_name_answers_the_rows(
    plane: Plane, client: Client, poems: dict[str, Any], result: Path, rows: Path
) -> None:
    then = {"serve": {"name": "poet"}, "generate": {"data": {"files": [str(rows)], "prompt": "q"}}}
    job = client.submit({**poems, "then": then})
    store = plane.store
    other = ServeJob.model_validate({"name": "poet", "model": {"path": str(result)}})

    def replace() -> None:
        """Let another deployment take the name after the link has started, and before the batch is queued."""
        finish(plane, job, result)
        serve = job.training.then.serve
        assert serve is not None
        first = store.chains.serve(job.id, serve.deployment(job.id)).links[0].started
        store.deployments.stop(str(first))
        store.deployments.create(other, reason="")

    plane.restart(replace)
    serve, generate = settled(plane, job).links
    (up,) = store.deployments.list()
    assert (serve.state, generate.state) == (LinkState.started, LinkState.failed)
    assert (
        generate.reason
        == f"{serve.started}, the deployment of then.serve, is over; {up.id} has its name poet"
    )
    assert (generate.error or {})["hint"].endswith(f"; then: share-compute resume {job.id}")
    client.undeploy("poet")
    client.resume(job.id)
    serve, generate = settled(plane, job).links
    (up,) = store.deployments.list()
    assert (serve.started, store.chains.deployment_of(str(generate.started))) == (up.id, up.id)


class BusyStarter:
    """A starter that records when it was called; it is busy with a job for a minute, then with another one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.asked: list[float] = []

    def start(self, job: JobRecord, name: LinkName) -> JobRecord:
        self.asked.append(self._clock())
        other = "lions" if self._clock() < 60 else "tigers"
        raise Busy(f"{name} of {job.name} waits for {other}", hint="later")


def test_a_busy_server_is_asked_ever_more_rarely(store: Store, poems: dict[str, Any], rows: Path) -> None:
    then = {"serve": {"name": "poet"}, "generate": {"data": {"files": [str(rows)], "prompt": "q"}}}
    job = store.jobs.create(parse_job({**poems, "then": then}))
    store.jobs.begin(job.id, [])
    store.jobs.move(job.id, JobState.running, "running", attempt=1)
    store.progress.record(job.id, 1, [AttemptEnded(outcome="succeeded", reason="done")])
    now_s = 0.0

    def clock() -> float:
        return now_s

    starter = BusyStarter(clock)
    supervisor = ChainSupervisor(store, cast("LinkStarter", starter), Notifier(), clock)

    async def pass_often() -> None:
        nonlocal now_s
        for tick in range(250):
            now_s = tick / 2
            await supervisor.start_due()

    asyncio.run(pass_often())
    assert starter.asked == [0, 1, 3, 7, 15, 31, 63, 123]
    serve, generate = store.jobs.get(job.id).links
    assert (serve.state, generate.state) == (LinkState.waiting, LinkState.waiting)
    reasons = [event.data["reason"] for event in store.events.after(0, job_id=job.id) if event.kind == "link"]
    assert reasons == [
        f"the server cannot check it yet, and tries again: serve of poems waits for {name}"
        for name in ("lions", "tigers")
    ]
    assert serve.reason == reasons[-1]


def test_causes_name_fields_of_the_job_and_only_owners_see_paths(
    plane: Plane, client: Client, poems: dict[str, Any], result: Path, rows: Path, tmp_path: Path
) -> None:
    generate = {"data": {"files": [str(rows)], "prompt": "q"}}
    jobs = [
        client.submit({**poems, "then": then})
        for then in ({"serve": {"name": "poet"}}, {"generate": generate}, {"generate": generate})
    ]
    _, key = plane.store.keys.create("eve", [Scope.read])
    wordless = _copy(result, tmp_path / "wordless")
    for file in wordless.glob("tokenizer*"):
        file.unlink()
    finish(plane, jobs[0], wordless)
    finish(plane, jobs[1], wordless)
    settled(plane, jobs[0])
    settled(plane, jobs[1])
    rows.unlink()
    finish(plane, jobs[2], result)
    settled(plane, jobs[2])
    fields = ("then.serve", "then.generate", "then.generate.data.files")
    for job, field in zip(jobs, fields, strict=True):
        (link,) = client.job(job.id).links
        error = link.error or {}
        assert link.reason.startswith(f"{field}: {tmp_path}")
        assert [one["field"] for one in error["details"]["fields"]] == [field]
        assert error["hint"].endswith(f", then: share-compute resume {job.id}")
        own, foreign = (_read(plane, job, secret) for secret in (plane.api_key, key))
        assert all(str(tmp_path) in text for text in own)
        assert not any(str(tmp_path) in text for text in foreign)
        assert all("only the key that submitted the job" in text for text in foreign)


def _read(plane: Plane, job: JobRecord, secret: str) -> list[str]:
    """Return all that a key can read of a job: its record, a page of its events, and both streams of events."""
    headers = {"Authorization": f"Bearer {secret}"}
    with httpx.Client(base_url=f"{plane.url}/api/v1", headers=headers) as http:
        texts = [
            http.get(path).text for path in (f"/jobs/{job.id}", f"/jobs/{job.id}/events?without=artifact")
        ]
        accept = {"Accept": "text/event-stream"}
        for path in (f"/jobs/{job.id}/events", "/events?after=0"):
            with http.stream("GET", path, headers=accept) as stream:
                texts.append(next(line for line in stream.iter_lines() if _is_of(line, job)))
    return texts


def _is_of(line: str, job: JobRecord) -> bool:
    return line.startswith("data:") and f'"job_id":"{job.id}"' in line and '"kind":"link"' in line


def test_the_process_that_exports_may_not_read_the_rows_of_links(
    plane: Plane, client: Client, poems: dict[str, Any], rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = client.submit({**poems, "then": {"generate": {"data": {"files": [str(rows)], "prompt": "q"}}}})
    (plane.settings.data_folder / TRAINING / job.id / "checkpoints" / "step-00000004").mkdir(parents=True)
    exported: list[tuple[ExportRequest, Policy]] = []

    async def export(request: ExportRequest, policy: Policy) -> int:
        exported.append((request, policy))
        return 1

    monkeypatch.setattr(plane.app.state.context.exports, "export", export)
    client.export(job.id, 4)
    ((request, policy),) = exported
    assert request.spec.then.links == ()
    assert list(policy.read) == poems["data"]["files"]
