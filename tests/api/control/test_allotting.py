"""Machines join and leave while jobs run: offers, drains, and two jobs that want the same machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.api.playing import Attempt, Cluster, laid, planned, proposed, run

from share_compute.errors import Unavailable
from share_compute.lifecycle.attempt_events import Reformed, ReplanAbandoned
from share_compute.lifecycle.states import ContributorState, JobState
from share_compute.store import Store
from share_compute_api.control.jobs.allotting import Allotment, Allotting
from share_compute_api.control.patience import Patience


def reformed(*contributor_ids: str, joined: tuple[str, ...] = (), left: tuple[str, ...] = ()) -> Reformed:
    return Reformed(
        epoch=2,
        step=5,
        plan=laid(*contributor_ids),
        joined=joined,
        left=left,
        seconds=0.5,
        recomputed=0,
        sentence="machines came and went",
    )


async def training(cluster: Cluster, job_id: str, *contributor_ids: str) -> Attempt:
    """Return the attempt of a job that runs on these machines."""
    attempt = await cluster.attempts.get()
    assert attempt.assignment.job_id == job_id
    await attempt.report(planned(*contributor_ids))
    await cluster.until(job_id, lambda job: job.state is JobState.running)
    return attempt


async def offered(attempt: Attempt) -> set[str]:
    return {machine.id for machine in (await attempt.offers.get()).topology.contributors}


async def answered(attempt: Attempt, number: int | None) -> set[str]:
    """Return the machines in the answer to a proposal."""
    while (offer := await attempt.offers.get()).answers != number:
        pass
    return {machine.id for machine in offer.topology.contributors}


def test_a_machine_that_joins_is_offered_and_leased_on_request(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada, job_id = cluster.contributor("ada"), cluster.submit()
        attempt = await training(cluster, job_id, ada)
        grace = cluster.contributor("grace")
        offer = await attempt.offers.get()
        assert [machine.id for machine in offer.topology.contributors] == [ada, grace]
        assert {link.source for link in offer.topology.links} == {ada, grace}
        assert (offer.answers, store.contributors.get(grace).job_id) == (None, None)
        await attempt.report(proposed(7, ada, grace))
        assert await answered(attempt, 7) == {ada, grace}
        assert store.contributors.get(grace).job_id == job_id
        other = cluster.submit("other")
        await cluster.until(
            other, lambda job: job.reason.endswith("none is ready (2 more work for other jobs)")
        )
        await attempt.report(reformed(ada, grace, joined=(grace,)))
        job = await cluster.until(job_id, lambda job: job.reason == "running on 2 machines in 1 stage")
        assert (job.plan, job.proposal) == (laid(ada, grace), None)
        assert store.contributors.get(grace).job_id == job_id

    run(store, tmp_path, story)


def test_a_machine_that_another_job_got_in_between_is_not_in_the_answer(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada, first = cluster.contributor("ada"), cluster.submit("first")
        attempt = await training(cluster, first, ada)
        grace, edsger = cluster.contributor("grace"), cluster.contributor("edsger")
        while await offered(attempt) != {ada, grace, edsger}:
            pass
        second = cluster.submit("second")
        await training(cluster, second, grace)
        await attempt.report(proposed(7, ada, grace, edsger))
        assert await answered(attempt, 7) == {ada, edsger}
        leases = {one.id: one.job_id for one in store.contributors.list()}
        assert leases == {ada: first, grace: second, edsger: first}
        await attempt.report(ReplanAbandoned(reason="the job cannot have grace"))
        await cluster.until(first, lambda job: job.proposal is None)
        assert await answered(attempt, None) == {ada, edsger}
        assert store.contributors.get(edsger).job_id is None

    run(store, tmp_path, story)


def test_who_leaves_on_its_way_into_a_job_is_let_go(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada, job_id = cluster.contributor("ada"), cluster.submit()
        attempt = await training(cluster, job_id, ada)
        grace = cluster.contributor("grace")
        await attempt.report(proposed(7, ada, grace))
        assert await answered(attempt, 7) == {ada, grace}
        store.contributors.leave(grace)
        assert await attempt.drains.get() == grace
        assert store.contributors.get(grace).job_id == job_id
        await attempt.report(ReplanAbandoned(reason="the job must do without grace"))
        await cluster.until(job_id, lambda job: job.proposal is None)
        assert store.contributors.get(grace).job_id is None

    run(store, tmp_path, story)


def test_an_offer_that_did_not_arrive_is_made_again(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada, job_id = cluster.contributor("ada"), cluster.submit()
        attempt = await training(cluster, job_id, ada)
        attempt.refusals.append(Unavailable("Ray is busy", hint="wait"))
        grace = cluster.contributor("grace")
        assert await offered(attempt) == {ada, grace}
        assert attempt.refusals == []

    run(store, tmp_path, story)


def test_a_queued_job_goes_first_and_the_offer_is_withdrawn(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada, first = cluster.contributor("ada"), cluster.submit("first")
        attempt = await training(cluster, first, ada)
        grace = cluster.contributor("grace")
        assert await offered(attempt) == {ada, grace}
        second = cluster.submit("second")
        other = await training(cluster, second, grace)
        assert await offered(attempt) == {ada}
        # The first job took the machine at the same moment. The second job holds its lease, so the first must drain it.
        await attempt.report(reformed(ada, grace, joined=(grace,)))
        assert await attempt.drains.get() == grace
        assert store.contributors.get(grace).job_id == second
        assert other.drains.empty()

    run(store, tmp_path, story)


def test_a_job_with_fixed_stages_is_offered_nothing(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada, fixed = cluster.contributor("ada"), cluster.submit("fixed", stages=1)
        attempt = await training(cluster, fixed, ada)
        grace, elastic = cluster.contributor("grace"), cluster.submit("elastic")
        other = await training(cluster, elastic, grace)
        edsger = cluster.contributor("edsger")
        assert await offered(other) == {grace, edsger}
        assert attempt.offers.empty()

    run(store, tmp_path, story)


def test_a_job_with_fixed_stages_is_offered_machines_when_it_was_left_on_fewer(
    store: Store, tmp_path: Path
) -> None:
    async def story(cluster: Cluster) -> None:
        ada, fixed = cluster.contributor("ada"), cluster.submit("fixed", stages=2)
        grace = cluster.contributor("grace")
        attempt = await training(cluster, fixed, ada, grace)
        edsger = cluster.contributor("edsger")
        assert attempt.offers.empty()
        await attempt.report(reformed(ada, left=(grace,)))
        while not {ada, edsger} <= await offered(attempt):
            pass

    run(store, tmp_path, story)


def test_who_leaves_hands_over_first(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada, grace = cluster.contributor("ada"), cluster.contributor("grace")
        job_id = cluster.submit()
        attempt = await training(cluster, job_id, ada, grace)
        assert store.contributors.leave(grace).state is ContributorState.draining
        assert await attempt.drains.get() == grace
        assert await offered(attempt) == {ada}
        assert store.contributors.get(grace).job_id == job_id
        await attempt.report(reformed(ada, left=(grace,)))
        await cluster.until(job_id, lambda job: job.plan == laid(ada))
        assert store.contributors.get(grace).job_id is None
        assert attempt.drains.empty()

    run(store, tmp_path, story)


def test_who_leaves_before_there_is_a_plan_is_left_out_of_it(store: Store, tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada, grace = cluster.contributor("ada"), cluster.contributor("grace")
        cluster.submit()
        attempt = await cluster.attempts.get()
        store.contributors.leave(grace)
        assert await attempt.drains.get() == grace
        assert await offered(attempt) == {ada}
        await attempt.report(planned(ada))

    run(store, tmp_path, story)


class TestAllotting:
    """Offers of machines to jobs, on a clock that a test sets."""

    @pytest.fixture
    def cluster(self, store: Store, tmp_path: Path) -> Cluster:
        return Cluster(store, tmp_path, Patience())

    def running(self, cluster: Cluster, name: str) -> str:
        machine, job_id = cluster.contributor(f"of-{name}"), cluster.submit(name)
        cluster.store.jobs.begin(job_id, [machine])
        cluster.store.progress.record(job_id, 1, [planned(machine)])
        return job_id

    def allot(self, cluster: Cluster, allotting: Allotting) -> dict[str, Allotment]:
        present = cluster.store.contributors.list([ContributorState.ready])
        spare = [machine for machine in present if machine.job_id is None]
        return allotting.allot(cluster.store.jobs.active(), present, spare)

    def test_a_machine_is_offered_to_one_job_after_the_other(self, cluster: Cluster) -> None:
        now = [0.0]
        allotting = Allotting(Patience(offer_s=300), clock=lambda: now[0])
        jobs = [self.running(cluster, name) for name in ("first", "second")]
        cluster.contributor("spare")

        def taker() -> list[str]:
            return [
                job for job, allotted in self.allot(cluster, allotting).items() if len(allotted.nodes) == 2
            ]

        assert taker() == jobs[:1]
        now[0] = 299
        assert taker() == jobs[:1]
        now[0] = 300
        assert taker() == jobs[1:]
        now[0] = 600
        assert taker() == jobs[:1]
        cluster.store.jobs.cancel(jobs[0])
        assert taker() == jobs[1:]

    def test_signs_of_life_are_no_news_but_a_new_node_is(self, cluster: Cluster) -> None:
        allotting = Allotting(Patience())
        self.running(cluster, "job")
        spare = cluster.contributor("spare")
        before = self.allot(cluster, allotting)
        cluster.store.heartbeats.note(spare)
        assert self.allot(cluster, allotting) == before
        cluster.arrive(spare)
        assert self.allot(cluster, allotting) != before

    def test_what_was_requested_in_vain_is_not_offered_before_that_is_given_up(
        self, cluster: Cluster
    ) -> None:
        allotting = Allotting(Patience())
        job_id, grace = self.running(cluster, "job"), cluster.contributor("grace")
        (ada,) = (machine.id for machine in cluster.store.contributors.list() if machine.job_id == job_id)
        other = cluster.submit("other")
        cluster.store.jobs.begin(other, [grace])
        cluster.store.progress.record(job_id, 1, [proposed(7, ada, grace)])
        cluster.store.jobs.cancel(other)
        cluster.store.jobs.move(other, JobState.cancelled, "cancelled", attempt=1)
        allotted = self.allot(cluster, allotting)[job_id]
        assert ([one.id for one in allotted.machines], allotted.answers) == ([ada], 7)
        cluster.store.progress.record(job_id, 1, [ReplanAbandoned(reason="the job cannot have grace")])
        allotted = self.allot(cluster, allotting)[job_id]
        assert ([one.id for one in allotted.machines], allotted.answers) == ([ada, grace], None)

    def test_what_a_plan_still_has_is_not_offered(self, cluster: Cluster) -> None:
        job_id = self.running(cluster, "job")
        (machine,) = cluster.store.contributors.list()
        cluster.lose(machine.id, "its Ray node is dead")
        cluster.store.contributors.rejoin(machine.id)
        cluster.arrive(machine.id)
        allotment = self.allot(cluster, Allotting(Patience()))[job_id]
        assert (allotment.machines, allotment.leaving) == ((), frozenset())
