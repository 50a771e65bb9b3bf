"""Jobs survive machines and coordinators: they are retried, wait for machines, and fail after some attempts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.api.playing import Attempt, Cluster, planned, run, step

from share_compute.errors import (
    ContributorLost,
    PlanInfeasible,
    ShardStoreLost,
    ShareComputeError,
    Unavailable,
)
from share_compute.lifecycle.attempt_events import AttemptEnded, CheckpointSaved, LayersTimed
from share_compute.lifecycle.states import JobState
from share_compute.planning.cost.timings import LayerTiming, MachineTimings
from share_compute.store import ContributorRecord, Store
from share_compute_api.control.jobs.leftovers import Leftovers
from share_compute_api.control.jobs.retry_policy import AttemptFailure, next_attempt
from share_compute_api.control.jobs.waiting import Waiting
from share_compute_api.control.patience import Patience

LOST = AttemptEnded(
    outcome="failed",
    reason="machines were lost: ada",
    error={"code": "contributor-lost", "hint": "resume it"},
)
LACKING = {"code": "plan-infeasible", "details": {"missing_bytes": 1288490189}}
TOO_LARGE = AttemptEnded(outcome="failed", reason="the job needs 3 GiB", error=LACKING)
DIED = ContributorLost("the job's coordinator died", hint="resume it")


def test_a_job_that_lost_its_machines_continues_from_its_checkpoint(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada, job_id = cluster.contributor("ada"), cluster.submit()
        attempt = await cluster.attempts.get()
        saved = CheckpointSaved(step=2, path=tmp_path / "checkpoint", size_bytes=1)
        device = attempt.assignment.topology[ada].device
        timed = {ada: MachineTimings(microbatch_size=1, device=device, layers={0: LayerTiming(0.1, 0.2)})}
        assert attempt.assignment.timings == {}
        await attempt.report(planned(ada), LayersTimed(step=1, machines=timed), step(2), saved, step(3), LOST)
        again = await cluster.attempts.get()
        assert attempt.killed.is_set()
        assert (again.assignment.attempt, again.assignment.checkpoint) == (2, tmp_path / "checkpoint")
        assert again.assignment.timings == timed
        (reported,) = [event for event in store.events.after(0, job_id=job_id) if event.data.get("error")]
        assert reported.data["reason"] == (
            "machines were lost: ada; continuing from its checkpoint of step 2 as soon as enough machines are ready"
        )
        assert (reported.data["state"], reported.data["error"]) == ("queued", LOST.error)
        job = store.jobs.get(job_id)
        assert (job.error, job.step, job.fruitless_attempts) == (None, 2, 0)

    run(store, tmp_path, story)


@pytest.mark.parametrize("failure", [DIED, Unavailable("Ray does not answer", hint="resume it")])
def test_a_job_outlives_its_coordinator(store: Store, tmp_path: Path, failure: ShareComputeError) -> None:
    async def story(cluster: Cluster) -> None:
        ada, job_id = cluster.contributor("ada"), cluster.submit()
        attempt = await cluster.attempts.get()
        await attempt.report(planned(ada))
        await cluster.until(job_id, lambda job: job.state is JobState.running)
        await attempt.die(failure)
        assert (await cluster.attempts.get()).assignment.attempt == 2

    run(store, tmp_path, story)


STORE_DIED = {"code": ShardStoreLost.code, "hint": "resume it"}


@pytest.mark.parametrize(
    ("failure", "pauses"),
    [
        (AttemptFailure.noticed(DIED), False),
        (AttemptFailure.reported("the shard store died", STORE_DIED), False),
        (AttemptFailure.reported("the compiler failed", {"code": "compiler-failed"}), True),
        (AttemptFailure.reported(LOST.reason, LOST.error), True),
    ],
)
def test_members_that_live_do_not_wait(store: Store, failure: AttemptFailure, *, pauses: bool) -> None:
    cluster = Cluster(store, Path(), Patience())
    job = store.jobs.get(cluster.submit())
    first = next_attempt(job, failure, has_committed=False, others_run=False)
    assert first is not None
    assert (first.pauses, first.fruitless_attempts) == (pauses, 1)
    second = next_attempt(
        job.model_copy(update={"fruitless_attempts": 1}), failure, has_committed=False, others_run=False
    )
    assert second is not None
    assert second.pauses  # an attempt that fails at once would probably fail again at once


def test_machines_whose_members_live_are_kept_for_the_takeover(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada, first, second = (
            cluster.contributor("ada"),
            cluster.submit("first", stages=2),
            cluster.submit("second"),
        )
        attempt = await cluster.attempts.get()
        await attempt.report(planned(ada), step(1))
        await cluster.until(second, lambda job: job.step == 1)
        cluster.members[ada] = {second}
        await attempt.die(DIED)
        again = await cluster.attempts.get()
        assert (again.assignment.job_id, again.assignment.attempt) == (second, 2)
        # There are now as many machines as the first job needs, but it may not use one of them.
        grace = cluster.contributor("grace")
        await again.die(DIED)
        last = await cluster.attempts.get()
        assert (last.assignment.job_id, last.assignment.attempt) == (second, 3)
        assert {one.id for one in last.assignment.topology.contributors} == {ada, grace}
        reasons = [event.data.get("reason") for event in store.events.after(0, job_id=first)]
        held = "needs 2, 1 is ready (1 more holds members of another job)"
        assert f"waiting for contributors: {held}" in reasons
        cluster.members.clear()
        await last.report(planned(ada), AttemptEnded(outcome="succeeded", reason="done"))
        assert (await cluster.attempts.get()).assignment.job_id == first

    run(store, tmp_path, story)


def test_the_next_attempt_knows_which_steps_are_known(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada = cluster.contributor("ada")
        cluster.submit()
        attempt = await cluster.attempts.get()
        assert attempt.assignment.known_step == 0
        saved = CheckpointSaved(step=2, path=tmp_path / "checkpoint", size_bytes=1)
        await attempt.report(planned(ada), step(1), step(2), saved, step(3))
        await cluster.until(attempt.assignment.job_id, lambda job: job.step == 3)
        await attempt.die(DIED)
        again = (await cluster.attempts.get()).assignment
        assert (again.known_step, again.checkpoint) == (3, tmp_path / "checkpoint")

    run(store, tmp_path, story, Patience(retry_s=3600))


def test_members_of_jobs_that_are_over_are_ended(store: Store) -> None:
    cluster = Cluster(store, Path(), Patience())
    waits, runs, cancelled = (cluster.submit(name) for name in ("waits", "runs", "cancelled"))
    store.jobs.begin(runs, [cluster.contributor("ada")])
    store.jobs.cancel(cancelled)
    ended = []

    async def members() -> dict[str, set[str]]:
        return {
            "con-1": {waits, runs, cancelled, f"{waits}/0", f"{runs}/1", f"{cancelled}/0"},
            "con-2": {"job-of-another-store", runs, "dep-1/0", "dep-1/1", f"{cancelled}/1"},
        }

    async def end(job_id: str) -> int:
        ended.append(job_id)
        return 1

    asyncio.run(Leftovers(store, members, end, serves="dep-1/0".__eq__).poll())
    branches = [f"{cancelled}/0", f"{cancelled}/1"]
    assert ended == sorted([cancelled, *branches, "job-of-another-store", "dep-1/1"])


def test_attempts_that_get_nowhere_end(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada, job_id = cluster.contributor("ada"), cluster.submit()
        first = await cluster.attempts.get()
        await first.report(planned(ada), step(1), LOST)
        for _ in range(4):
            await (await cluster.attempts.get()).report(planned(ada), LOST)
        sixth = await cluster.attempts.get()
        assert store.jobs.get(job_id).fruitless_attempts == 4
        await sixth.report(planned(ada), LOST)
        failed = await cluster.until(job_id, lambda job: job.state is JobState.failed)
        assert (failed.attempt, failed.reason, failed.error) == (6, LOST.reason, LOST.error)
        assert store.events.after(0, job_id=job_id)[-2].kind == "ended"
        resumed = await asyncio.to_thread(store.jobs.resume, job_id)
        assert resumed.fruitless_attempts == 0

    run(store, tmp_path, story)


def test_a_coordinator_that_stays_unresponsive_is_given_up_in_the_end(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.contributor("ada")
        job_id = cluster.submit("unresponsive")
        job = await cluster.until(job_id, lambda job: job.state is JobState.failed)
        assert (job.attempt, job.reason) == (5, "the job's coordinator does not answer")
        assert (await cluster.attempts.get()).killed.is_set()

    run(store, tmp_path, story, Patience(answer_s=0.05, retry_s=0))


async def too_large_now(cluster: Cluster, attempt: Attempt, job_id: str) -> str:
    """Let an attempt find that its machines cannot hold the job; return what the job waits for."""
    await attempt.report(TOO_LARGE)
    waiting = await cluster.until(
        job_id, lambda job: job.state is JobState.queued and job.attempt > attempt.assignment.attempt
    )
    return waiting.reason


def test_a_job_that_ran_waits_for_the_memory_that_was_lost(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada, grace = cluster.contributor("ada"), cluster.contributor("grace")
        job_id = cluster.submit()
        attempt = await cluster.attempts.get()
        await attempt.report(planned(ada, grace), step(1))
        await cluster.until(job_id, lambda job: job.step == 1)
        cluster.lose(grace, "its Ray node is dead")
        await attempt.report(LOST)
        reason = await too_large_now(cluster, await cluster.attempts.get(), job_id)
        assert reason == (
            "waiting for contributors: needs about 1.2 GiB more memory: let another machine join; "
            "continuing from the start (it has no checkpoint) as soon as enough machines are ready"
        )
        edsger = cluster.contributor("edsger")
        another = await cluster.attempts.get()
        assert {one.id for one in another.assignment.topology.contributors} == {ada, edsger}
        await too_large_now(cluster, another, job_id)
        cluster.lose(edsger, "its Ray node is dead")
        store.contributors.rejoin(grace)
        cluster.arrive(grace)
        last = await cluster.attempts.get()
        assert {one.id for one in last.assignment.topology.contributors} == {ada, grace}
        assert store.jobs.get(job_id).fruitless_attempts == 0

    run(store, tmp_path, story)


def test_a_job_that_never_fitted_fails(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.contributor("ada")
        job_id = cluster.submit()
        await (await cluster.attempts.get()).report(TOO_LARGE)
        failed = await cluster.until(job_id, lambda job: job.state is JobState.failed)
        assert (failed.attempt, failed.error) == (1, LACKING)

    run(store, tmp_path, story)


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_job_that_was_asked_to_stop_is_not_tried_again(
    store: Store, tmp_path: Path, *, is_reported: bool
) -> None:
    async def story(cluster: Cluster) -> None:
        ada, job_id = cluster.contributor("ada"), cluster.submit()
        attempt = await cluster.attempts.get()
        await attempt.report(planned(ada))
        await asyncio.to_thread(store.jobs.cancel, job_id)
        await attempt.cancelled.wait()
        await (attempt.report(LOST) if is_reported else attempt.die(DIED))
        over = await cluster.until(job_id, lambda job: job.state.is_final)
        assert (over.state, over.error, over.attempt) == (JobState.cancelled, None, 1)
        reason = LOST.reason if is_reported else DIED.message
        assert over.reason == f"cancelled; its attempt ended on its own: {reason}"

    run(store, tmp_path, story)


def test_a_mistake_is_no_loss(store: Store) -> None:
    cluster = Cluster(store, Path(), Patience())
    job = store.jobs.get(cluster.submit())
    mistake = AttemptFailure.reported("no such file", {"code": "not-found"})
    assert next_attempt(job, mistake, has_committed=True, others_run=True) is None


@pytest.mark.parametrize("is_lasting", [True, False])
def test_a_plan_that_no_machines_can_carry_out_is_not_waited_for(store: Store, *, is_lasting: bool) -> None:
    cluster = Cluster(store, Path(), Patience())
    job = store.jobs.get(cluster.submit())
    error = {"code": PlanInfeasible.code, "details": {"is_lasting": True} if is_lasting else {}}
    failure = AttemptFailure.reported("it is for another model", error)
    again = next_attempt(job, failure, has_committed=False, others_run=True)
    assert (again is None) == is_lasting


class TestResting:
    """A job whose attempt was lost, on a clock that a test sets."""

    @pytest.fixture
    def now(self) -> list[float]:
        return [0.0]

    def supply(self, store: Store, waiting: Waiting) -> Any:
        present = store.contributors.list(waiting.states())
        return waiting.supply(present, store.jobs.queued(), {}, anything_runs=False)

    @pytest.mark.parametrize(("fruitless", "pause_s"), [(0, 4.0), (1, 4.0), (2, 8.0), (4, 32.0)])
    def test_it_rests_longer_each_time(
        self, store: Store, now: list[float], fruitless: int, pause_s: float
    ) -> None:
        cluster, waiting = Cluster(store, Path(), Patience()), Waiting(Patience(), clock=lambda: now[0])
        ada, job_id = cluster.contributor("ada"), cluster.submit()
        store.jobs.begin(job_id, [ada])
        job = store.jobs.requeue(job_id, "ada is gone", attempt=1, fruitless_attempts=fruitless)
        waiting.pause(job)
        now[0] = pause_s - 0.01
        assert waiting.pauses(job)
        assert self.supply(store, waiting).why_not(job) == job.reason
        now[0] = pause_s
        assert self.supply(store, waiting).why_not(job) is None

    def test_its_machines_are_kept_for_it(self, store: Store, tmp_path: Path) -> None:
        async def story(cluster: Cluster) -> None:
            ada, first = cluster.contributor("ada"), cluster.submit("first")
            attempt = await cluster.attempts.get()
            await attempt.report(planned(ada), LOST)
            await cluster.until(first, lambda job: job.attempt == 2)
            second = cluster.submit("second")
            await cluster.until(second, lambda job: "none is ready (1 more works" in job.reason)
            assert (await cluster.attempts.get()).assignment.job_id == first

        run(store, tmp_path, story, Patience(retry_s=0.3))

    def test_its_machines_are_kept_for_it_if_it_is_queued_while_the_store_is_read(
        self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        machines = store.contributors.list

        async def story(cluster: Cluster) -> None:
            ada, first = cluster.contributor("ada"), cluster.submit("first")
            attempt = await cluster.attempts.get()
            cluster.submit("second")
            loop = asyncio.get_running_loop()

            def list_after_a_loss(states: Any) -> list[ContributorRecord]:
                monkeypatch.undo()
                asyncio.run_coroutine_threadsafe(attempt.report(planned(ada), LOST), loop).result()
                asyncio.run_coroutine_threadsafe(
                    cluster.until(first, lambda job: job.attempt == 2), loop
                ).result()
                return machines(states)

            monkeypatch.setattr(store.contributors, "list", list_after_a_loss)
            assert (await cluster.attempts.get()).assignment.job_id == first

        run(store, tmp_path, story, Patience(retry_s=0.3))
