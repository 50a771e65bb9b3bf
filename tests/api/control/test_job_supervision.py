"""The supervisor with attempts whose events a test declares: order, leases, cancelling, failing, restarting."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.api.playing import Cluster, planned, run, step
from tests.databases import writing

from share_compute.errors import ContributorLost
from share_compute.lifecycle.attempt_events import (
    ArtifactSaved,
    AttemptEnded,
    CheckpointSaved,
)
from share_compute.lifecycle.states import JobState
from share_compute.store import Store
from share_compute_api.connection.notifier import Notifier
from share_compute_api.control import AWAY
from share_compute_api.control.jobs.waiting import Waiting
from share_compute_api.control.patience import Patience

SUCCEEDED = AttemptEnded(outcome="succeeded", reason="done")
TOO_LARGE = AttemptEnded(outcome="failed", reason="needs two machines", error={"code": "plan-infeasible"})


def test_a_job_waits_for_contributors_then_runs_to_its_end(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        job_id = cluster.submit()
        await cluster.until(
            job_id, lambda job: job.reason.startswith("waiting for contributors: needs 1, none is ready")
        )
        ada = cluster.contributor("ada")
        attempt = await cluster.attempts.get()
        assert attempt.assignment.job_id == job_id
        assert attempt.assignment.folder == tmp_path / "jobs" / job_id
        assert [machine.id for machine in attempt.assignment.topology.contributors] == [ada]
        assert [link.target for link in attempt.assignment.topology.links] == ["head"]
        assert attempt.assignment.checkpoint_every_s is None
        assert store.jobs.get(job_id).state == "planning"
        await attempt.report(planned(ada), step(1))
        await cluster.until(job_id, lambda job: job.step == 1 and job.state is JobState.running)
        artifact = ArtifactSaved(name="model", path=tmp_path, size_bytes=1)
        await attempt.report(artifact, SUCCEEDED)
        await cluster.until(job_id, lambda job: job.state is JobState.succeeded)
        await attempt.killed.wait()
        assert store.contributors.get(ada).job_id is None

    run(store, tmp_path, story)


def test_jobs_share_the_cluster_by_what_their_plans_use(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada, grace = cluster.contributor("ada"), cluster.contributor("grace")
        first, second = cluster.submit("first"), cluster.submit("second")
        attempt = await cluster.attempts.get()
        assert attempt.assignment.job_id == first
        await cluster.until(
            second, lambda job: job.reason.startswith("waiting for contributors: needs 1, none is ready")
        )
        await attempt.report(planned(ada))  # grace has no layers in this plan
        other = await cluster.attempts.get()
        assert other.assignment.job_id == second
        assert [machine.id for machine in other.assignment.topology.contributors] == [grace]
        # It does not fit beside the first job, so it waits for that job's end instead of failing.
        await other.report(TOO_LARGE)
        waiting = await cluster.until(second, lambda job: job.state is JobState.queued)
        assert "or wait until other jobs give machines back" in waiting.reason
        await attempt.report(SUCCEEDED)
        again = await cluster.attempts.get()
        assert {machine.id for machine in again.assignment.topology.contributors} == {ada, grace}
        await again.report(TOO_LARGE)
        failed = await cluster.until(second, lambda job: job.state is JobState.failed)
        assert failed.error == {"code": "plan-infeasible"}

    run(store, tmp_path, story)


def test_cancelling_asks_the_attempt_to_stop(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada, job_id = cluster.contributor("ada"), cluster.submit()
        attempt = await cluster.attempts.get()
        await attempt.report(planned(ada))
        await asyncio.to_thread(store.jobs.cancel, job_id)
        await attempt.cancelled.wait()
        await attempt.report(AttemptEnded(outcome="cancelled", reason="cancelled on request"))
        await cluster.until(job_id, lambda job: job.state is JobState.cancelled)

    run(store, tmp_path, story)


def test_a_coordinator_that_dies_after_a_request_to_cancel_has_done_what_was_requested(
    store: Store, tmp_path: Path
) -> None:
    async def story(cluster: Cluster) -> None:
        ada, job_id = cluster.contributor("ada"), cluster.submit()
        attempt = await cluster.attempts.get()
        await attempt.report(planned(ada))
        await asyncio.to_thread(store.jobs.cancel, job_id)
        await attempt.cancelled.wait()
        await attempt.die(ContributorLost("the job's coordinator died", hint="resume it"))
        over = await cluster.until(job_id, lambda job: job.state.is_final)
        assert (over.state, over.error) == (JobState.cancelled, None)
        assert over.reason.endswith("the job's coordinator died")

    run(store, tmp_path, story)


def test_a_job_goes_on_after_the_server_was_restarted(store: Store, tmp_path: Path) -> None:
    async def first_life(cluster: Cluster) -> None:
        ada, job_id = cluster.contributor("ada"), cluster.submit()
        attempt = await cluster.attempts.get()
        saved = CheckpointSaved(step=5, path=tmp_path / "checkpoint", size_bytes=1)
        await attempt.report(planned(ada), step(5), saved)
        await cluster.until(job_id, lambda job: job.checkpoint_step == 5)

    async def second_life(cluster: Cluster) -> None:
        again = await cluster.attempts.get()
        assert (again.assignment.attempt, again.assignment.checkpoint) == (2, tmp_path / "checkpoint")
        reasons = [event.data.get("reason") for event in store.events.after(0)]
        assert (
            "the server was restarted; continuing from its members' state, else from its checkpoint of step 5, "
            "as soon as enough machines are ready"
        ) in reasons

    run(store, tmp_path, first_life)
    run(store, tmp_path, second_life)


def test_a_job_waits_for_its_machines_after_a_restart(store: Store, tmp_path: Path) -> None:
    async def first_life(cluster: Cluster) -> None:
        machines = [cluster.contributor(name) for name in ("ada", "grace")]
        job_id = cluster.submit(stages=2)
        attempt = await cluster.attempts.get()
        await attempt.report(planned(*machines))
        await cluster.until(job_id, lambda job: job.state is JobState.running)
        for machine in machines:
            cluster.lose(machine, AWAY)

    async def second_life(cluster: Cluster) -> None:
        ada, grace = store.contributors.list()
        store.contributors.rejoin(ada.id)
        cluster.arrive(ada.id)
        (job,) = store.jobs.page()[0]
        await cluster.until(job.id, lambda job: job.reason.endswith("needs 2, 1 is ready"))
        store.contributors.rejoin(grace.id)
        cluster.arrive(grace.id)
        assert (await cluster.attempts.get()).assignment.attempt == 2

    run(store, tmp_path, first_life)
    run(store, tmp_path, second_life)


def test_a_waiting_job_does_not_keep_the_server_busy(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        job_id = cluster.submit()
        await cluster.until(job_id, lambda job: job.reason.startswith("waiting"))
        rings: list[None] = []
        store.on_commit(lambda: rings.append(None))
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await cluster.attempts.get()
        assert len(rings) <= 3

    run(store, tmp_path, story)


@contextmanager
def without_table(store: Store, name: str) -> Iterator[None]:
    """Let every statement fail that needs a table, as it would on a full disk."""
    with writing(store) as session:
        session.connection().exec_driver_sql(f"ALTER TABLE {name} RENAME TO away")
    yield
    with writing(store) as session:
        session.connection().exec_driver_sql(f"ALTER TABLE away RENAME TO {name}")


async def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    while text not in caplog.text:  # noqa: ASYNC110 - a log rings no notifier
        await asyncio.sleep(0.01)


def test_a_job_whose_end_could_not_be_written_is_queued_again(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(cluster: Cluster) -> None:
        ada, job_id = cluster.contributor("ada"), cluster.submit()
        attempt = await cluster.attempts.get()
        await attempt.report(planned(ada))
        await cluster.until(job_id, lambda job: job.state is JobState.running)
        with without_table(store, "events"):
            await attempt.report(step(1))
            await logged(caplog, "its end could not be written")
            await logged(caplog, "jobs could not be checked")
        again = await cluster.attempts.get()
        assert again.assignment.attempt == 2
        assert attempt.killed.is_set()
        reasons = [event.data.get("reason") for event in store.events.after(0, job_id=job_id)]
        lost = "its attempt was lost; continuing from its members' state, else from the start (it has no checkpoint)"
        assert f"{lost}, as soon as enough machines are ready" in reasons

    run(store, tmp_path, story, Patience(store_s=0))


def test_what_runs_goes_on_while_the_store_is_away(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(cluster: Cluster) -> None:
        ada, job_id = cluster.contributor("ada"), cluster.submit()
        attempt = await cluster.attempts.get()
        await attempt.report(planned(ada))
        await cluster.until(job_id, lambda job: job.state is JobState.running)
        with without_table(store, "jobs"):
            await attempt.report(step(1))
            await logged(caplog, "jobs could not be checked")
            await logged(caplog, "trying again")
        await attempt.report(SUCCEEDED)
        job = await cluster.until(job_id, lambda job: job.state is JobState.succeeded)
        assert (job.attempt, job.step) == (1, 1)

    run(store, tmp_path, story)


def test_a_coordinator_that_does_not_answer_can_be_cancelled(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.contributor("ada")
        job_id = cluster.submit("unresponsive")
        attempt = await cluster.attempts.get()
        await asyncio.to_thread(store.jobs.cancel, job_id)
        job = await cluster.until(job_id, lambda job: job.state is JobState.cancelled)
        assert "did not stop within" in job.reason
        assert attempt.cancelled.is_set()

    run(store, tmp_path, story, Patience(answer_s=60, cancel_s=0.1))


def test_a_job_waits_for_as_many_machines_as_it_needs(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        large, small = (
            cluster.submit("large", stages=2, members_per_stage=2),
            cluster.submit("small", stages=1),
        )
        ada = cluster.contributor("ada")
        attempt = await cluster.attempts.get()
        assert attempt.assignment.job_id == small  # it starts before the larger job
        busy = "waiting for contributors: needs 4, none is ready (1 more works for other jobs)"
        await cluster.until(large, lambda job: job.reason == busy)
        others = [cluster.contributor(name) for name in ("grace", "edsger")]
        busy = "waiting for contributors: needs 4, 2 are ready (1 more works for other jobs)"
        await cluster.until(large, lambda job: job.reason == busy)
        await attempt.report(planned(ada), SUCCEEDED)
        await cluster.until(large, lambda job: job.reason.endswith("needs 4, 3 are ready"))
        last = cluster.contributor("barbara")
        attempt = await cluster.attempts.get()
        offered = {machine.id for machine in attempt.assignment.topology.contributors}
        assert offered == {ada, *others, last}

    run(store, tmp_path, story)


def pinned(*names: str) -> dict[str, Any]:
    """Return the content of a plan file with a layer for each machine."""
    return {
        "kind": "plan",
        "version": 1,
        "model": {"layers": len(names), "digest": "0" * 32},
        "microbatches": 1,
        "stages": [
            {"first_layer": layer, "last_layer": layer, "machines": [{"name": name, "microbatches": 1}]}
            for layer, name in enumerate(names)
        ],
    }


def test_a_job_with_a_pinned_plan_waits_for_its_machines_and_takes_no_others(
    store: Store, tmp_path: Path
) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.contributor("edsger")
        ada = cluster.contributor("ada")
        job_id = cluster.submit(plan=pinned("ada", "grace"))
        reason = "waiting for contributors: the pinned plan needs grace, not ready or not free"
        await cluster.until(job_id, lambda job: job.reason == reason)
        grace = cluster.contributor("grace")
        attempt = await cluster.attempts.get()
        assert {machine.id for machine in attempt.assignment.topology.contributors} == {ada, grace}
        assert not attempt.assignment.has_run
        await attempt.report(planned(ada, grace), step(1))
        job = await cluster.until(job_id, lambda job: job.step == 1)
        # The pinned plan has been used once, so from now on the job continues on any machines.
        assert (job.pinned_machines, job.machines_needed, job.gains_from_more) == (None, 1, True)

    run(store, tmp_path, story)


def test_a_job_without_a_wish_waits_for_machines_that_are_coming(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        grace = cluster.join("grace")
        away = cluster.contributor("away")
        cluster.lose(away, AWAY)
        ada, job_id = cluster.contributor("ada"), cluster.submit()
        await cluster.until(job_id, lambda job: job.reason.endswith("1 is ready, 2 are about to be"))
        cluster.arrive(grace)
        await cluster.until(job_id, lambda job: job.reason.endswith("2 are ready, 1 is about to be"))
        store.contributors.rejoin(away)
        cluster.arrive(away)
        attempt = await cluster.attempts.get()
        assert {one.id for one in attempt.assignment.topology.contributors} == {ada, grace, away}

    run(store, tmp_path, story)


class TestWaiting:
    """Reasons for which jobs wait, on a clock that a test sets."""

    @pytest.fixture
    def cluster(self, store: Store, tmp_path: Path) -> Cluster:
        return Cluster(store, tmp_path, Patience())

    def why_not(
        self, cluster: Cluster, waiting: Waiting, job_id: str, *, anything_runs: bool = True
    ) -> str | None:
        job = cluster.store.jobs.get(job_id)
        present = cluster.store.contributors.list(waiting.states())
        return waiting.supply(present, [job], cluster.members, anything_runs=anything_runs).why_not(job)

    def test_nobody_is_waited_for_for_ever(self, cluster: Cluster) -> None:
        now = [0.0]
        waiting = Waiting(Patience(return_s=60, arrival_s=120), clock=lambda: now[0])
        ada = cluster.contributor("ada")
        cluster.lose(ada, AWAY)
        cluster.contributor("grace")
        first, second = cluster.submit(), cluster.submit()
        assert self.why_not(cluster, waiting, first) is not None
        now[0] = 61.0
        assert self.why_not(cluster, waiting, first) is None
        cluster.join("edsger")  # and its Ray node never starts
        assert self.why_not(cluster, waiting, second) is not None
        now[0] = 61.0 + 121.0
        assert self.why_not(cluster, waiting, second) is None

    def test_machines_that_were_too_few_are_tried_again_when_that_may_help(self, cluster: Cluster) -> None:
        waiting = Waiting(Patience())
        machines = [cluster.store.contributors.get(cluster.contributor("ada"))]
        job = cluster.store.jobs.get(cluster.submit())
        waiting.tried(job, machines)
        assert self.why_not(cluster, waiting, job.id) is not None
        assert self.why_not(cluster, waiting, job.id, anything_runs=False) is None
        waiting.tried(job, machines)
        cluster.store.jobs.cancel(job.id)
        cluster.store.jobs.resume(job.id)
        assert self.why_not(cluster, waiting, job.id) is None

    def test_what_a_queued_job_may_soon_begin_with_is_not_spare(self, cluster: Cluster) -> None:
        waiting = Waiting(Patience())
        ada, late = cluster.contributor("ada"), cluster.join("late")
        job = cluster.store.jobs.get(cluster.submit(members_per_stage=2))

        def spare() -> list[str]:
            present = cluster.store.contributors.list(waiting.states())
            supply = waiting.supply(present, [job], cluster.members, anything_runs=True)
            return [machine.id for machine in supply.spare([job])]

        assert spare() == []
        cluster.lose(late, "its Ray node did not come up")
        assert spare() == [ada]
        grace = cluster.contributor("grace")
        assert spare() == []
        waiting.tried(job, [cluster.store.contributors.get(one) for one in (ada, grace)])
        assert spare() == [ada, grace]
        cluster.members[ada] = {"job-that-is-over"}
        assert spare() == [grace]

    def test_members_of_branches_are_members_of_their_job(self, cluster: Cluster) -> None:
        waiting = Waiting(Patience())
        ada, grace, job_id = (
            cluster.contributor("ada"),
            cluster.contributor("grace"),
            cluster.submit(stages=2),
        )
        cluster.members |= {ada: {f"{job_id}/0", f"{job_id}/1"}, grace: {f"{job_id}/1"}}
        assert self.why_not(cluster, waiting, job_id) is None
        cluster.members[grace] = {"job-that-waits/0"}
        reason = self.why_not(cluster, waiting, job_id)
        assert reason is not None
        assert "1 more holds members of another job" in reason
        assert "continues from its members' state on 1 machine" in reason

    def test_words_say_what_holds_members_and_what_a_job_goes_on_with(self, cluster: Cluster) -> None:
        waiting = Waiting(Patience())
        ada, grace, job_id = (
            cluster.contributor("ada"),
            cluster.contributor("grace"),
            cluster.submit(stages=2),
        )
        cluster.members |= {ada: {"job-that-waits"}, grace: {job_id}}
        assert self.why_not(cluster, waiting, job_id) == (
            "waiting for contributors: needs 2, 1 is ready (1 more holds members of another job); "
            "continues from its members' state on 1 machine"
        )
        cluster.members[ada] = {job_id}
        assert self.why_not(cluster, waiting, job_id) is None

    def test_a_job_waits_for_the_machines_that_its_members_are_on(self, cluster: Cluster) -> None:
        now = [0.0]
        waiting = Waiting(Patience(arrival_s=120), clock=lambda: now[0])
        ada, _, late = cluster.contributor("ada"), cluster.contributor("grace"), cluster.join("late")
        job_id = cluster.submit(stages=2)
        assert self.why_not(cluster, waiting, job_id) is None
        cluster.members |= {ada: {job_id}, late: {job_id}}
        assert self.why_not(cluster, waiting, job_id) == (
            "waiting for contributors: 2 are ready, 1 is about to be; continues from its members' state on 2 machines"
        )
        now[0] = 121.0
        assert self.why_not(cluster, waiting, job_id) is None
        now[0] = 0.0
        cluster.arrive(late)
        assert self.why_not(cluster, waiting, job_id) is None


@pytest.mark.parametrize("timeout_s", [0.01, 20])
def test_a_wait_ends_though_the_notifier_was_notified_before_it(timeout_s: float) -> None:
    async def main() -> bool:
        notifier = Notifier()
        await notifier.wait(notifier.ticket, 0.0)
        ticket = notifier.ticket
        if timeout_s > 1:
            notifier.notify()
        return await notifier.wait(ticket, timeout_s)

    assert asyncio.run(main()) is (timeout_s > 1)


def test_all_jobs_are_suspended_at_once_and_none_begins_meanwhile(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        machines = [cluster.contributor(name) for name in ("ada", "grace")]
        for name in ("first", "second"):
            cluster.submit(name)
        attempts = []
        for machine in machines:
            attempt = await cluster.attempts.get()
            attempt.suspension.clear()  # both are asked before one answers
            await attempt.report(planned(machine))
            attempts.append(attempt)

        async def answer() -> None:
            for attempt in attempts:
                await attempt.suspended.wait()
            for attempt in attempts:
                attempt.suspension.set()

        answering = asyncio.create_task(answer())
        async with cluster.supervisor.suspended(within_s=10) as count:
            assert count == 2
            assert answering.done()
            third = cluster.submit("third")
        assert (await cluster.attempts.get()).assignment.job_id == third

    run(store, tmp_path, story)
