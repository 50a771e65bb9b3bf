"""The supervisor with attempts that play declared events: order, leases, cancelling, failing, restarting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from share_compute.errors import ContributorLost, ShareComputeError
from share_compute.jobs.events import (
    ArtifactSaved,
    Assignment,
    AttemptEnded,
    AttemptEvent,
    CheckpointSaved,
    Planned,
    StepCommitted,
)
from share_compute.jobs.states import JobState
from share_compute.planning.plan import MemberPlan, Plan, PoolPlan
from share_compute.specification import parse_job
from share_compute.store import JobRecord, Store
from share_compute.topology import Device, Link
from share_compute_api.bell import Bell
from share_compute_api.supervision.jobs import JobSupervisor

SUCCEEDED = AttemptEnded(outcome="succeeded", reason="done")
TOO_LARGE = AttemptEnded(outcome="failed", reason="needs two machines", error={"code": "plan-infeasible"})


class Attempt:
    """Tells the events that a test puts in, as a coordinator would."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.told: list[AttemptEvent] = []
        self.failure: ShareComputeError | None = None
        self.cancelled = asyncio.Event()
        self.killed = asyncio.Event()
        self._news = asyncio.Condition()

    async def tell(self, *events: AttemptEvent) -> None:
        async with self._news:
            self.told += events
            self._news.notify_all()

    async def events(self, after: int, timeout_s: float) -> list[AttemptEvent]:
        async with self._news:
            try:
                async with asyncio.timeout(timeout_s / 20):
                    await self._news.wait_for(lambda: len(self.told) > after or self.failure)
            except TimeoutError:
                return []
            if self.failure is not None:
                raise self.failure
            return self.told[after:]

    async def die(self, failure: ShareComputeError) -> None:
        async with self._news:
            self.failure = failure
            self._news.notify_all()

    async def cancel(self) -> None:
        self.cancelled.set()

    def kill(self) -> None:
        self.killed.set()


class Pool:
    """A store, a supervisor, and the attempts that it started."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.bell = Bell()
        self.attempts: asyncio.Queue[Attempt] = asyncio.Queue()
        self.supervisor = JobSupervisor(store, self._launch, folder, self.bell)
        store.on_commit(self.bell.ring)

    async def _launch(self, assignment: Assignment) -> Attempt:
        attempt = Attempt(assignment)
        await self.attempts.put(attempt)
        return attempt

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.supervisor.run())
        try:
            async with asyncio.timeout(20):
                yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def contributor(self, name: str) -> str:
        record, _ = self.store.contributors.join(
            self.store.invites.create()[1], name=name, host="h", versions={}, limits={"cpu_threads": 2}
        )
        self.store.contributors.online(record.id, node_id="ab", address="192.0.2.7")
        links = [Link(record.id, "head", 0.001, 1e9), Link(record.id, "con-gone", 0.001, 1e9)]
        self.store.contributors.ready(record.id, capacity=[Device("cpu", "c", 2**30)], links=links)
        return record.id

    def submit(self, name: str = "job") -> str:
        layers = [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]
        return self.store.jobs.create(
            parse_job({"name": name, "model": {"layers": layers}, "data": {"dataset": "digits"}})
        ).id

    async def until(self, job_id: str, condition: Callable[[JobRecord], Any]) -> JobRecord:
        while True:
            ticket = self.bell.ticket
            record = await asyncio.to_thread(self.store.jobs.get, job_id)
            if condition(record):
                return record
            await self.bell.wait(ticket, 1.0)


def planned(*contributor_ids: str) -> Planned:
    members = tuple(
        MemberPlan(contributor_id=one, name=one, microbatches=(0,), memory_bytes=1, reason="")
        for one in contributor_ids
    )
    pool = PoolPlan(start=0, stop=1, parameters=1, members=members)
    return Planned(plan=Plan(epoch=0, strategy="uniform", num_layers=1, parameters=1, pools=(pool,)))


def step(number: int) -> StepCommitted:
    return StepCommitted(
        step=number,
        loss=1.0,
        learning_rate=0.1,
        gradient_norm=None,
        samples=1,
        tokens=1,
        seconds=1,
        tokens_per_s=1,
    )


def run(store: Store, tmp_path: Path, story: Callable[[Pool], Awaitable[None]]) -> None:
    pool = Pool(store, tmp_path / "jobs")

    async def main() -> None:
        async with pool.running():
            await story(pool)

    asyncio.run(main())


def test_a_job_waits_for_contributors_then_runs_to_its_end(store: Store, tmp_path: Path) -> None:
    async def story(pool: Pool) -> None:
        job_id = pool.submit()
        await pool.until(job_id, lambda job: job.reason == "waiting for contributors")
        ada = pool.contributor("ada")
        attempt = await pool.attempts.get()
        assert attempt.assignment.job_id == job_id
        assert attempt.assignment.folder == tmp_path / "jobs" / job_id
        assert [machine.id for machine in attempt.assignment.topology.contributors] == [ada]
        assert [link.target for link in attempt.assignment.topology.links] == ["head"]
        assert store.jobs.get(job_id).state == "planning"
        await attempt.tell(planned(ada), step(1))
        await pool.until(job_id, lambda job: job.step == 1 and job.state is JobState.running)
        artifact = ArtifactSaved(name="model", path=tmp_path, size_bytes=1)
        await attempt.tell(artifact, SUCCEEDED)
        await pool.until(job_id, lambda job: job.state is JobState.succeeded)
        await attempt.killed.wait()
        assert store.contributors.get(ada).job_id is None

    run(store, tmp_path, story)


def test_jobs_share_the_pool_by_what_their_plans_use(store: Store, tmp_path: Path) -> None:
    async def story(pool: Pool) -> None:
        ada, grace = pool.contributor("ada"), pool.contributor("grace")
        first, second = pool.submit("first"), pool.submit("second")
        attempt = await pool.attempts.get()
        assert attempt.assignment.job_id == first
        await pool.until(second, lambda job: job.reason == "waiting for contributors")
        await attempt.tell(planned(ada))  # grace is idle in this plan
        other = await pool.attempts.get()
        assert other.assignment.job_id == second
        assert [machine.id for machine in other.assignment.topology.contributors] == [grace]
        # It does not fit beside the first, so it waits for it to end instead of failing.
        await other.tell(TOO_LARGE)
        waiting = await pool.until(second, lambda job: job.state is JobState.queued)
        assert "other jobs hold" in waiting.reason
        await attempt.tell(SUCCEEDED)
        again = await pool.attempts.get()
        assert {machine.id for machine in again.assignment.topology.contributors} == {ada, grace}
        await again.tell(TOO_LARGE)
        failed = await pool.until(second, lambda job: job.state is JobState.failed)
        assert failed.error == {"code": "plan-infeasible"}

    run(store, tmp_path, story)


def test_cancelling_asks_the_attempt_to_stop(store: Store, tmp_path: Path) -> None:
    async def story(pool: Pool) -> None:
        ada, job_id = pool.contributor("ada"), pool.submit()
        attempt = await pool.attempts.get()
        await attempt.tell(planned(ada))
        await asyncio.to_thread(store.jobs.cancel, job_id)
        await attempt.cancelled.wait()
        await attempt.tell(AttemptEnded(outcome="cancelled", reason="cancelled on request"))
        await pool.until(job_id, lambda job: job.state is JobState.cancelled)

    run(store, tmp_path, story)


def test_a_dead_coordinator_fails_the_job_which_then_resumes(store: Store, tmp_path: Path) -> None:
    async def story(pool: Pool) -> None:
        ada, job_id = pool.contributor("ada"), pool.submit()
        attempt = await pool.attempts.get()
        saved = CheckpointSaved(step=2, path=tmp_path / "checkpoint", size_bytes=1)
        await attempt.tell(planned(ada), step(1), step(2), saved)
        await pool.until(job_id, lambda job: job.step == 2)
        await attempt.die(ContributorLost("the job's coordinator died", mend="resume it"))
        failed = await pool.until(job_id, lambda job: job.state is JobState.failed)
        assert failed.error is not None
        assert (failed.error["code"], failed.error["mend"]) == ("contributor-lost", "resume it")
        await attempt.killed.wait()
        await asyncio.to_thread(store.jobs.resume, job_id)
        again = await pool.attempts.get()
        assert again.assignment.attempt == 2
        assert again.assignment.checkpoint == tmp_path / "checkpoint"

    run(store, tmp_path, story)


def test_a_job_goes_on_after_the_server_was_restarted(store: Store, tmp_path: Path) -> None:
    async def first_life(pool: Pool) -> None:
        ada, job_id = pool.contributor("ada"), pool.submit()
        attempt = await pool.attempts.get()
        saved = CheckpointSaved(step=5, path=tmp_path / "checkpoint", size_bytes=1)
        await attempt.tell(planned(ada), step(5), saved)
        await pool.until(job_id, lambda job: job.checkpoint_step == 5)

    async def second_life(pool: Pool) -> None:
        again = await pool.attempts.get()
        assert (again.assignment.attempt, again.assignment.checkpoint) == (2, tmp_path / "checkpoint")
        reasons = [event.data.get("reason") for event in store.events.after(0)]
        assert "the server was restarted; continuing from step 5" in reasons

    run(store, tmp_path, first_life)
    run(store, tmp_path, second_life)


@pytest.mark.parametrize("timeout_s", [0.01, 20])
def test_a_bell_is_heard_though_it_rang_before_the_wait(timeout_s: float) -> None:
    async def main() -> bool:
        bell = Bell()
        await bell.wait(bell.ticket, 0.0)
        ticket = bell.ticket
        if timeout_s > 1:
            bell.ring()
        return await bell.wait(ticket, timeout_s)

    assert asyncio.run(main()) is (timeout_s > 1)
