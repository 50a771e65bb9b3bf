"""The supervisor with jobs of kind sparse, whose events a test declares: machines, steps, losses, an end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.api.playing import Cluster, run, step

from share_compute.lifecycle.attempt_events import (
    ArtifactSaved,
    AttemptEnded,
    RangesPlaced,
    SparseAssignment,
    Started,
)
from share_compute.lifecycle.states import JobState
from share_compute.specification import parse_any_job
from share_compute.store import Store

LOST = AttemptEnded(outcome="failed", reason="all were lost", error={"code": "contributor-lost"})


def submit(store: Store, **fields: Any) -> str:
    data = {"files": ["/data/rows.libsvm"]}
    spec = {"kind": "sparse", "model": {"name": "logistic"}, "data": data, **fields}
    return store.jobs.create(parse_any_job(spec)).id


def placed(*machines: str) -> RangesPlaced:
    return RangesPlaced(machines=machines, sentence=f"2 workers on {len(machines)} machines")


def test_it_keeps_the_machines_that_it_names_and_counts_steps(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada, grace, mary = (cluster.contributor(name) for name in ("ada", "grace", "mary"))
        job_id = submit(store)
        attempt = await cluster.attempts.get()
        assert isinstance(attempt.assignment, SparseAssignment)
        assert {one.id for one in attempt.assignment.topology.contributors} == {ada, grace, mary}
        await attempt.report(placed(ada, grace))
        record = await cluster.until(job_id, lambda job: job.state is JobState.running)
        assert record.reason == "2 workers on 2 machines"
        assert [store.contributors.get(one).job_id for one in (ada, grace, mary)] == [job_id, job_id, None]
        await attempt.report(Started(first_step=1, total_steps=40), step(7))
        record = await cluster.until(job_id, lambda job: job.step == 7)
        assert record.total_steps == 40
        assert not record.counts_tokens
        await attempt.report(placed(grace))
        await cluster.until(job_id, lambda job: job.reason == "2 workers on 1 machines")
        assert store.contributors.get(ada).job_id is None
        saved = ArtifactSaved(name="model", path=tmp_path / "model.safetensors", size_bytes=1)
        await attempt.report(saved, AttemptEnded(outcome="succeeded", reason="trained"))
        await cluster.until(job_id, lambda job: job.state is JobState.succeeded)
        await attempt.killed.wait()
        assert store.contributors.get(grace).job_id is None
        assert [one.name for one in store.progress.artifacts(job_id)] == ["model"]

    run(store, tmp_path, story)


def test_it_takes_only_machines_that_the_job_may_use(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.contributor("ada", site="rome")
        job_id = submit(store, parallelism={"only": ["site=paris"]})
        reason = "waiting for contributors: needs 1, none is ready; waits for a machine with site=paris"
        await cluster.until(job_id, lambda job: job.reason == reason)
        grace = cluster.contributor("grace", site="paris")
        attempt = await cluster.attempts.get()
        assert [one.id for one in attempt.assignment.topology.contributors] == [grace]

    run(store, tmp_path, story)


def test_a_lost_attempt_is_made_again_from_the_start(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada = cluster.contributor("ada")
        job_id = submit(store)
        first = await cluster.attempts.get()
        await first.report(placed(ada), Started(first_step=1, total_steps=40), step(7), LOST)
        second = await cluster.attempts.get()
        record = await cluster.until(job_id, lambda job: job.attempt == 2)
        assert record.step == 0
        assert second.assignment.attempt == 2
        reasons = [
            event.data["reason"]
            for event in store.events.after(0, job_id=job_id, limit=100)
            if event.kind == "state"
        ]
        assert "all were lost; continuing from the start (it has no checkpoint)" in reasons

    run(store, tmp_path, story)


def test_it_waits_for_one_machine_only(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        job_id = submit(store, training={"workers": 8, "servers": 4})
        await cluster.until(
            job_id, lambda job: job.reason == "waiting for contributors: needs 1, none is ready"
        )
        cluster.contributor("ada")
        attempt = await cluster.attempts.get()
        assert attempt.assignment.job_id == job_id

    run(store, tmp_path, story)
