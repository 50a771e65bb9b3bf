"""The work of machines, and the summary of all machines."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from tests.platform.store.test_deployments import spec as serve
from tests.platform.store.test_jobs import contributor, running, spec, step

from share_compute.lifecycle.attempt_events import AttemptEnded, Measured, Planned, Reformed, StageTiming
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.states import ContributorState
from share_compute.planning.plan import BranchPlan, MemberPlan, Plan, StagePlan
from share_compute.store import Store
from share_compute.store import work as work_module
from share_compute.store.work import parts
from share_compute.topology import Device, Link


def plan(*shares: tuple[str, tuple[int, ...]], epoch: int = 0) -> Plan:
    """Return a plan of one stage of four microbatches."""
    members = tuple(
        MemberPlan(contributor_id=one, name=one, microbatches=some, memory_bytes=7, reason="")
        for one, some in shares
    )
    stage = StagePlan(start=0, stop=2, parameters=1, members=members)
    return Plan(epoch=epoch, strategy="uniform", num_layers=3, parameters=1, stages=(stage,), microbatches=4)


def work_events(store: Store, machine: str) -> list[tuple[Any, Any]]:
    """Return (job, microbatches) of each event about the work of a machine."""
    events = store.events.after(0, contributor_id=machine)
    return [(one.data["job"], one.data.get("microbatches")) for one in events if one.kind == "work"]


def reformed(made: Plan, first_open: int) -> Reformed:
    return Reformed(
        epoch=made.epoch, step=first_open, plan=made, seconds=0.1, recomputed=0, sentence="ada came"
    )


def test_work_is_reported_when_it_begins_changes_and_ends(store: Store, clock: Any) -> None:
    ada, bob = contributor(store, "ada"), contributor(store, "bob")
    job = store.jobs.create(spec())
    store.jobs.begin(job.id, [ada, bob])
    clock.pass_s(5)
    store.progress.record(job.id, 1, [Planned(plan=plan((ada, (0, 1, 2, 3)))), step(1), step(2)])
    assert work_events(store, ada) == [(job.id, None), (job.id, 4)]
    assert work_events(store, bob) == [(job.id, None), (None, None)]
    # Steps that were committed before the membership change count by the old shares, however events are grouped.
    clock.pass_s(60)
    shared = plan((ada, (0, 1, 2)), (bob, (3,)), epoch=1)
    store.progress.record(job.id, 1, [step(3), reformed(shared, 4), step(4)])
    clock.pass_s(60)
    store.progress.record(job.id, 1, [AttemptEnded(outcome="succeeded", reason="done")])
    assert work_events(store, ada)[2:] == [(job.id, 3), (None, None)]
    clock.pass_s(1000)
    work = store.work.of(ada)
    assert [(one.steps, one.microbatches, one.seconds) for one in work.periods] == [
        (1, 3, 60),
        (3, 4, 60),
        (0, None, 5),
    ]
    assert (work.steps, work.microbatches, work.samples) == (4, 15, 3 * 16 + 12)
    assert (work.is_complete, work.periods[0].ended_at is not None, work.periods[0].name) == (
        True,
        True,
        "train",
    )
    assert store.work.of(bob).microbatches == 1
    latest = store.work.of(ada, limit=1)
    assert (latest.is_complete, latest.steps) == (False, 1)


def test_the_running_total_of_a_machine_equals_the_sums_of_its_periods(store: Store, clock: Any) -> None:
    ada, bob = contributor(store, "ada"), contributor(store, "bob")

    def check() -> None:
        for machine in (ada, bob):
            work = store.work.of(machine)
            total = store.work.total(machine)
            assert total is not None
            assert total.model_dump() == work.model_dump(include=set(type(total).model_fields))
            clock.pass_s(3)

    check()
    job = store.jobs.create(spec())
    store.jobs.begin(job.id, [ada, bob])
    check()
    store.progress.record(job.id, 1, [Planned(plan=plan((ada, (0, 1, 2, 3)))), step(1), step(2)])
    check()
    shared = plan((ada, (0, 1, 2)), (bob, (3,)), epoch=1)
    store.progress.record(job.id, 1, [step(3), reformed(shared, 4), step(4), step(5)])
    check()
    store.contributors.set_state(store.contributors.get(bob), ContributorState.lost, "its node died")
    store.progress.record(job.id, 1, [step(6)])
    check()
    store.progress.record(job.id, 1, [AttemptEnded(outcome="succeeded", reason="done")])
    check()
    check()


def test_a_running_total_is_counted_in_pieces(open_store: Any) -> None:
    store = open_store()
    ada = contributor(store, "ada")
    job = running(store, ada)
    store.progress.record(job.id, 1, [step(number) for number in range(1, 8)])
    restarted = open_store()
    pieces = [restarted.work.total(ada, most_events=3) for _ in range(4)]
    assert pieces[0] is None
    assert pieces[-1] == store.work.total(ada)
    assert pieces[-1] is not None
    assert pieces[-1].steps == 7


def test_machines_of_a_job_share_the_counts_of_its_steps(
    open_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_module, "BLOCK_EVENTS", 4)
    monkeypatch.setattr(work_module, "NEW_EVENTS", 10)
    store = open_store()
    ada, bob = contributor(store, "ada"), contributor(store, "bob")
    job = running(store, ada, bob)
    first = Planned(plan=plan((ada, (0, 1, 2)), (bob, (3,))))
    store.progress.record(job.id, 1, [first, *(step(number) for number in range(1, 30))])
    restarted = open_store()
    for machine in (ada, bob):
        total = restarted.work.total(machine)
        while total is None:
            total = restarted.work.total(machine, most_events=9)
        assert total == store.work.total(machine)
        assert (total.steps, total.samples) == (29, store.work.of(machine).samples)


def branched(*shares: tuple[str, tuple[int, ...]]) -> Plan:
    """Return a plan with a branch of one stage for each machine."""
    stages = [plan(share).stages for share in shares]
    branches = tuple(BranchPlan(number=number, stages=some) for number, some in enumerate(stages))
    return plan(shares[0]).model_copy(update={"branches": branches})


def test_machines_of_all_branches_show_what_they_hold(store: Store) -> None:
    every = (0, 1, 2, 3)
    ada, bob = contributor(store, "ada"), contributor(store, "bob")
    job = store.jobs.create(spec())
    store.jobs.begin(job.id, [ada, bob])
    laid = branched((ada, every), (bob, every), (bob, every))
    store.progress.record(job.id, 1, [Planned(plan=laid), step(1).model_copy(update={"samples": 48})])
    held = {row.id: row.held for row in store.cluster.summaries()}
    assert [
        (one.start, one.stop, one.microbatches, one.of_microbatches, one.memory_bytes)
        for one in (held[ada], held[bob])
        if one is not None
    ] == [(0, 2, 4, 12, 7), (0, 2, 8, 12, 14)]
    # A step has the samples of all three branches.
    assert (store.work.of(ada).samples, store.work.of(bob).samples) == (16, 32)


def test_rows_of_older_releases_have_no_branches() -> None:
    laid = plan(("ada", (0, 1)), ("bob", (2, 3)))
    row = laid.model_dump(mode="json", exclude={"branches"})
    assert parts(row) == parts(laid.model_dump(mode="json"))
    assert [(machine, part["microbatches"]) for machine, part in parts(row).items()] == [
        ("ada", 2),
        ("bob", 2),
    ]


def test_a_plan_that_stays_is_not_reported_again(store: Store) -> None:
    ada = contributor(store, "ada")
    job = running(store, ada)
    before = work_events(store, ada)
    same = job.plan
    assert same is not None
    store.progress.record(job.id, 1, [reformed(same, 1)])
    assert work_events(store, ada) == before


def test_a_machine_that_is_lost_works_no_more(store: Store, clock: Any) -> None:
    ada = contributor(store, "ada")
    job = running(store, ada)
    clock.pass_s(10)
    store.contributors.set_state(store.contributors.get(ada), ContributorState.lost, "its node died")
    clock.pass_s(10)
    store.progress.record(job.id, 1, [step(1)])
    (period, _) = store.work.of(ada).periods
    assert (period.ended_at is not None, period.seconds, period.steps) == (True, 10, 0)


def test_a_machine_that_comes_back_to_the_same_part_works_again(store: Store, clock: Any) -> None:
    ada, bob = contributor(store, "ada"), contributor(store, "bob")
    job = running(store, ada, bob)
    assert job.plan is not None
    for state in (ContributorState.lost, ContributorState.joining, ContributorState.probing):
        store.contributors.set_state(store.contributors.get(ada), state, "its node died")
    store.contributors.ready(ada, capacity=[Device("cpu", "cpu", 2**30, {"float32": 1e9})], links=[])
    clock.pass_s(10)
    store.progress.record(job.id, 1, [reformed(job.plan, 1), step(1)])
    (again, *_) = store.work.of(ada).periods
    assert (again.num_layers, again.ended_at, again.steps) == (job.plan.num_layers, None, 1)


def test_busy_time_is_kept_by_machine_within_a_bound(store: Store, clock: Any) -> None:
    ada, bob = contributor(store, "ada"), contributor(store, "bob")
    job = running(store, ada, bob)
    begun = clock.now

    def measured(number: int, machines: dict[str, float]) -> Measured:
        timing = StageTiming(predicted_busy_s=None, measured_busy_s=0.9)
        return Measured(
            step=number, predicted_step_s=None, measured_step_s=1.0, stages=(timing,), machines=machines
        )

    # The first event is from an older release: it has only the time of the stage's busiest machine.
    store.progress.record(job.id, 1, [measured(10, {})])
    for number in range(20, 60, 10):
        clock.pass_s(10)
        store.progress.record(job.id, 1, [measured(number, {ada: number / 100, bob: 2.0})])
    busy = store.work.busy(ada, since=begun)
    assert [round(one.busy_fraction, 2) for one in busy] == [0.9, 0.2, 0.3, 0.4, 0.5]
    assert {one.busy_fraction for one in store.work.busy(bob, since=clock.now)} == {1.0}
    thin = store.work.busy(ada, since=begun, points=2)
    assert [(round(one.busy_fraction, 3), one.at) for one in thin] == [
        (0.467, begun + timedelta(seconds=20)),
        (0.45, clock.now),
    ]
    assert store.work.busy(ada, since=clock.now + timedelta(seconds=1)) == []


def test_summaries_of_machines_have_owners_links_and_what_is_held(store: Store, clock: Any) -> None:
    code = store.invites.create(label="Ada's laptop")[1]
    ada = store.contributors.join(code, name="ada", host="h", versions={}, limits={"memory_bytes": 100})[0].id
    (row,) = store.cluster.summaries()
    assert (row.owner, row.kind, row.lent_bytes, row.held) == ("Ada's laptop", None, 100, None)
    store.contributors.online(ada, node_id="ab", address="192.0.2.7")
    devices = [
        Device("cpu", "a cpu", 50, {"float32": 2.0}),
        Device("cuda", "a gpu", 30, {"float32": 5.0, "bfloat16": 9.0}),
    ]
    store.contributors.ready(ada, capacity=devices, links=[Link("head", ada, 0.001, 1e9)])
    job = store.jobs.create(spec("letters"))
    store.jobs.begin(job.id, [ada])
    assert store.cluster.summaries([ada])[0].held is not None
    store.progress.record(job.id, 1, [Planned(plan=plan((ada, (0, 1, 2, 3))))])
    (row,) = store.cluster.summaries([ada])
    assert (row.kind, row.device, row.flops_per_s, row.lent_bytes) == ("cuda", "a cpu, a gpu", 7.0, 80)
    assert (row.head_latency_s, row.head_bytes_per_s) == (0.001, 1e9)
    assert row.held is not None
    assert (row.held.job_id, row.held.name, row.held.stop, row.held.memory_bytes) == (job.id, "letters", 2, 7)
    store.contributors.set_state(store.contributors.get(ada), ContributorState.lost, "its node died")
    assert store.cluster.summaries()[0].held is None
    clock.pass_s(2 * 86_400)
    assert store.cluster.summaries() == []
    assert len(store.cluster.summaries([ada])) == 1


def test_deployments_tell_what_their_machines_hold(store: Store, clock: Any) -> None:
    ada, bob = contributor(store, "ada"), contributor(store, "bob")
    served = store.deployments.create(serve(), reason="submitted")
    store.leases.take(served.id, [ada, bob])
    placed = [plan((ada, (0, 1, 2, 3)))]
    store.deployments.set_state(served.id, DeploymentState.loading, "it loads", plans=placed)
    clock.pass_s(30)
    rows = {row.id: row for row in store.cluster.summaries()}
    row, free = rows[ada], rows[bob]
    assert row.held is not None
    assert (row.held.deployment_id, row.held.name, row.held.stop) == (served.id, "llama", 2)
    assert free.held is not None
    assert free.held.stop is None
    store.leases.release(served.id, [bob])
    assert store.cluster.summaries([bob])[0].held is None
    store.leases.release_all(served.id)
    (last, first) = store.work.of(ada).periods
    assert (last.deployment_id, last.stop, last.seconds, last.steps, first.stop) == (
        served.id,
        2,
        30,
        0,
        None,
    )
