"""Heartbeats of machines, and the answers to them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, select, update
from tests.databases import reading, writing
from tests.platform.store.test_deployments import spec as serve
from tests.platform.store.test_jobs import contributor, spec, step
from tests.platform.store.test_work import branched, plan, reformed

from share_compute.errors import Fenced, NotAuthorized
from share_compute.lifecycle.attempt_events import AttemptEnded, Planned
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.states import ContributorState
from share_compute.store import Store
from share_compute.store.database.tables import ContributorRow, ServerEpochRow
from share_compute.topology import HEAD, Device, Link


def joined(store: Store, name: str) -> tuple[str, str]:
    """Return the id and the key of a machine that joined."""
    record, key = store.contributors.join(
        store.invites.create()[1], name=name, host="host", versions={}, limits={}
    )
    return record.id, key


def stored(store: Store, machine: str) -> datetime:
    """Return the time of a machine's last heartbeat in the database."""
    with reading(store) as session:
        return session.scalars(select(ContributorRow.last_seen_at).where(ContributorRow.id == machine)).one()


def shown(store: Store, machine: str) -> set[datetime]:
    """Return the time of a machine's last heartbeat in each read of the store."""
    contributors = store.contributors
    (row,) = contributors.list(ids=[machine])
    (page,) = (one for one in contributors.page()[0] if one.id == machine)
    (presence,) = (one for one in contributors.presences(store.clock()) if one.id == machine)
    (summary,) = store.cluster.summaries([machine])
    return {one.last_seen_at for one in (row, page, presence, summary, contributors.get(machine))}


def test_heartbeats_are_read_at_once_and_written_together(store: Store, clock: Any) -> None:
    ada, bob = contributor(store, "ada"), contributor(store, "bob")
    store.heartbeats.write()
    before = clock()
    clock.pass_s(2)
    commits: list[Connection] = []

    def count(connection: Connection) -> None:
        commits.append(connection)

    event.listen(Engine, "commit", count)
    try:
        for machine in (ada, bob, ada):
            store.heartbeats.note(machine)
        assert shown(store, ada) == shown(store, bob) == {clock()}
        assert stored(store, ada) == before
        commits.clear()
        store.heartbeats.write()
        store.heartbeats.write()
        assert len(commits) == 1
    finally:
        event.remove(Engine, "commit", count)
    assert stored(store, ada) == stored(store, bob) == clock()


def test_written_heartbeats_are_still_read_when_they_are_no_longer_in_memory(
    store: Store, clock: Any
) -> None:
    ada, bob = contributor(store, "ada"), contributor(store, "bob")
    heard_at = clock()
    store.heartbeats.write()
    clock.pass_s(3600)
    store.heartbeats.note(bob)
    store.heartbeats.write()
    assert (shown(store, ada), shown(store, bob)) == ({heard_at}, {clock()})


def test_a_machine_that_comes_back_was_heard_from(store: Store, clock: Any) -> None:
    ada, _ = joined(store, "ada")
    assert shown(store, ada) == {clock()}
    for again in (
        lambda: store.contributors.online(ada, node_id="ab", address="192.0.2.7"),
        lambda: store.contributors.rejoin(ada),
    ):
        store.heartbeats.note(ada)
        clock.pass_s(5)
        assert again().last_seen_at == clock()
        assert shown(store, ada) == {clock()}
    store.heartbeats.write()
    assert stored(store, ada) == clock()


def test_the_last_heartbeats_are_written_when_the_server_ends(
    open_store: Callable[[], Store], clock: Any
) -> None:
    store = open_store()
    ada = contributor(store, "ada")
    clock.pass_s(2)
    store.heartbeats.note(ada)
    store.close()
    assert shown(open_store(), ada) == {clock()}


def test_heartbeats_that_cannot_be_written_are_kept(store: Store, clock: Any) -> None:
    ada, bob = contributor(store, "ada"), contributor(store, "bob")
    store.heartbeats.write()
    store.hold(check_s=1000)
    before = clock()
    clock.pass_s(2)
    store.heartbeats.note(ada)
    with writing(store) as session:
        session.execute(update(ServerEpochRow).values(epoch=ServerEpochRow.epoch + 1))
    with pytest.raises(Fenced):
        store.heartbeats.write()
    assert (stored(store, ada), shown(store, ada)) == (before, {clock()})
    store.heartbeats.note(bob)
    with writing(store) as session:
        session.execute(update(ServerEpochRow).values(epoch=ServerEpochRow.epoch - 1))
    store.heartbeats.write()
    assert stored(store, ada) == stored(store, bob) == clock()


def test_an_agent_shows_what_its_machine_holds(store: Store) -> None:
    (ada, ada_key), (bob, bob_key) = joined(store, "ada"), joined(store, "bob")
    for machine in (ada, bob):
        store.contributors.online(machine, node_id="ab", address="192.0.2.7")
        store.contributors.ready(machine, capacity=[], links=[])

    def parts() -> list[tuple[str | None, int | None, int | None]]:
        found = [store.cluster.agent(ada, ada_key).held, store.cluster.agent(bob, bob_key).held]
        return [(None, 0, 0) if one is None else (one.job_id, one.start, one.stop) for one in found]

    free = (None, 0, 0)
    assert parts() == [free, free]
    job = store.jobs.create(spec())
    store.jobs.begin(job.id, [ada, bob])
    assert parts() == [(job.id, None, None)] * 2
    store.progress.record(job.id, 1, [Planned(plan=plan((ada, (0, 1, 2, 3)))), step(1)])
    assert parts() == [(job.id, 0, 2), free]
    held = store.cluster.agent(ada, ada_key)
    assert held.held is not None
    assert (held.held.name, held.held.num_layers) == ("train", 3)
    assert held.tokens_per_s == store.jobs.get(job.id).tokens_per_s
    shared = plan((ada, (0, 1, 2)), (bob, (3,)), epoch=1)
    store.progress.record(job.id, 1, [reformed(shared, 2)])
    assert parts() == [(job.id, 0, 2)] * 2
    store.contributors.set_state(store.contributors.get(bob), ContributorState.lost, "its node died")
    assert parts() == [(job.id, 0, 2), free]
    store.progress.record(job.id, 1, [AttemptEnded(outcome="succeeded", reason="done")])
    assert parts() == [free, free]


def test_an_agent_of_a_later_branch_or_a_deployment_shows_its_layers(store: Store) -> None:
    (ada, key) = joined(store, "ada")
    bob = contributor(store, "bob")
    store.contributors.online(ada, node_id="ab", address="192.0.2.7")
    store.contributors.ready(ada, capacity=[], links=[])
    job = store.jobs.create(spec())
    store.jobs.begin(job.id, [ada, bob])
    every = (0, 1, 2, 3)
    store.progress.record(job.id, 1, [Planned(plan=branched((bob, every), (ada, every)))])
    held = store.cluster.agent(ada, key).held
    assert held is not None
    assert (held.job_id, held.start, held.stop) == (job.id, 0, 2)
    store.progress.record(job.id, 1, [AttemptEnded(outcome="succeeded", reason="done")])
    served = store.deployments.create(serve(), reason="submitted")
    store.leases.take(served.id, [ada])
    store.deployments.set_state(served.id, DeploymentState.loading, "it loads", plans=[plan((ada, every))])
    held = store.cluster.agent(ada, key).held
    assert held is not None
    assert (held.deployment_id, held.job_id, held.name, held.stop) == (served.id, None, "llama", 2)


def test_an_agent_shows_the_measurements_of_its_machine(store: Store) -> None:
    ada, key = joined(store, "ada")
    shown = store.cluster.agent(ada, key)
    assert (shown.flops_per_s, shown.head_latency_s, shown.head_bytes_per_s) == (None, None, None)
    store.contributors.online(ada, node_id="ab", address="192.0.2.7")
    devices = [
        Device("cpu", "processor", 2**30, {"float32": 9e10}),
        Device("cuda", "card", 2**30, {"float32": 1e12, "bfloat16": 4e12}),
    ]
    links = [Link(ada, "con-x", 0.5, 1.0), Link(ada, HEAD, 0.01234567, 1e8)]
    store.contributors.ready(ada, capacity=devices, links=links)
    shown = store.cluster.agent(ada, key)
    assert (shown.flops_per_s, shown.head_latency_s, shown.head_bytes_per_s) == (1e12, 0.01235, 1e8)
    store.contributors.relink(ada, [Link.dead(ada, HEAD)])
    shown = store.cluster.agent(ada, key)
    assert (shown.head_latency_s, shown.head_bytes_per_s) == (None, None)


def test_only_the_own_key_shows_what_a_machine_holds(store: Store) -> None:
    (ada, ada_key), (bob, bob_key) = joined(store, "ada"), joined(store, "bob")
    for machine, key in ((ada, bob_key), (bob, ada_key), ("con-none", ada_key), (ada, "")):
        with pytest.raises(NotAuthorized, match="not the key of this contributor"):
            store.cluster.agent(machine, key)
