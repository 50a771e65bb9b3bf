"""The routes that contributors' agents call, as far as they work without Ray."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import select
from tests.api.conftest import wait_until
from tests.databases import reading
from tests.platform.store.test_deployments import spec as serve
from tests.platform.store.test_jobs import spec, step
from tests.platform.store.test_work import plan

from share_compute.errors import (
    ClockSkew,
    Conflict,
    ContributorLost,
    InviteExpired,
    InviteRevoked,
    InviteUnknown,
    InviteUsed,
    NotAuthorized,
    ShareComputeError,
    Unavailable,
    VersionMismatch,
)
from share_compute.lifecycle.attempt_events import AttemptEnded, Planned
from share_compute.store import Store
from share_compute.store.database.tables import ContributorRow
from share_compute.topology import HEAD, Device, Link
from share_compute_api.agent.client import AgentClient, fetch_health, join
from share_compute_api.cluster.calls import NodeFacts
from share_compute_api.cluster.cluster import ClusterInfo
from share_compute_api.control import LABEL
from share_compute_api.control.machines.machines import Machine
from share_compute_api.control.machines.measuring import Measurements
from share_compute_api.schemas.agents import JoinRequest, MachineLimits, SiblingRequest
from share_compute_api.schemas.bodies import Versions
from share_compute_api.schemas.utilization import Utilization
from share_compute_api.schemas.versions import local_versions
from share_compute_api.server.context import Context


@pytest.fixture
def door(plane: Any) -> str:
    """URL of a server that reports a cluster; its loops that need Ray are not started."""
    context: Context = plane.app.state.context
    info = ClusterInfo("192.0.2.1:6379", "cluster-secret", "ab", "127.0.0.1", {"RAY_X": "1"})
    context.cluster = SimpleNamespace(info=info, is_rotating=False, trouble=None)
    return plane.url


def wanted(invite: str, name: str = "ada", **changes: Any) -> JoinRequest:
    values: dict[str, Any] = {
        "invite": invite,
        "name": name,
        "versions": local_versions(),
        "clock": datetime.now(UTC),
        "limits": MachineLimits(memory_bytes=2**30, cpu_threads=1),
        "host": "host",
    }
    return JoinRequest(**{**values, **changes})


def test_a_machine_gets_the_clusters_secret_only_when_it_is_in(door: str, store: Store) -> None:
    _, code = store.invites.create()
    joined = join(door, wanted(code))
    assert joined.cluster.token == "cluster-secret"
    assert joined.cluster.labels == {"share-compute-contributor": joined.contributor_id}
    assert joined.cluster.environment == {"RAY_X": "1"}
    with AgentClient(door, joined.contributor_id, joined.contributor_key) as agent:
        work = agent.heartbeat()
        assert (work.state, work.job, work.wanted) == ("joining", None, "run")
        assert agent.rejoin().token == "cluster-secret"
        assert agent.leave().state == "left"
        assert agent.heartbeat().wanted == "leave"
    with AgentClient(door, joined.contributor_id, "scc_wrong") as thief, pytest.raises(NotAuthorized):
        thief.rejoin()


def test_heartbeats_are_in_the_database_soon(door: str, store: Store) -> None:
    joined = join(door, wanted(store.invites.create()[1]))
    with AgentClient(door, joined.contributor_id, joined.contributor_key) as agent:
        agent.heartbeat()
    heard_at = store.contributors.get(joined.contributor_id).last_seen_at

    def stored() -> datetime:
        with reading(store) as session:
            query = select(ContributorRow.last_seen_at).where(ContributorRow.id == joined.contributor_id)
            return session.scalars(query).one()

    wait_until(lambda: stored() == heard_at)


def test_the_answer_to_a_heartbeat_says_what_the_machine_holds(door: str, store: Store) -> None:
    joined = join(door, wanted(store.invites.create()[1]))
    machine = joined.contributor_id
    store.contributors.online(machine, node_id="ab", address="192.0.2.7")
    store.contributors.ready(
        machine,
        capacity=[Device("cpu", "processor", 2**30, {"float32": 9e10})],
        links=[Link(machine, HEAD, 0.01, 1e8)],
    )
    with AgentClient(door, machine, joined.contributor_key) as agent:
        free = agent.heartbeat()
        assert (free.job, free.deployment, free.shard, free.tokens_per_s) == (None, None, None, None)
        assert (free.flops_per_s, free.head_latency_s, free.head_bytes_per_s) == (9e10, 0.01, 1e8)
        job = store.jobs.create(spec())
        store.jobs.begin(job.id, [machine])
        store.progress.record(job.id, 1, [Planned(plan=plan((machine, (0, 1, 2, 3)))), step(1)])
        busy = agent.heartbeat()
        assert (busy.job, busy.job_name, busy.deployment) == (job.id, "train", None)
        assert (busy.shard, busy.tokens_per_s) == ("layers 0-1 of 3", store.jobs.get(job.id).tokens_per_s)
        assert busy.contributed is None
        measured = agent.heartbeat(Utilization(cpu_fraction=0.5))
        assert measured.contributed is not None
        assert measured.contributed.steps == 1
        store.progress.record(job.id, 1, [AttemptEnded(outcome="succeeded", reason="done")])
        served = store.deployments.create(serve(), reason="submitted")
        store.leases.take(served.id, [machine])
        serving = agent.heartbeat()
        assert (serving.job, serving.job_name, serving.deployment) == (None, None, "llama")
        assert (serving.shard, serving.tokens_per_s) == (None, None)


def test_another_device_of_a_host_joins_by_the_key_of_the_first(door: str, store: Store) -> None:
    first = join(door, wanted(store.invites.create()[1], "box.cuda0"))
    other = SiblingRequest(**wanted("none", "box.cuda1").model_dump(exclude={"invite"}))
    with AgentClient(door, first.contributor_id, first.contributor_key) as agent:
        second = agent.join_sibling(other)
        with pytest.raises(Conflict, match=r"box\.cuda1"):
            agent.join_sibling(other)
        late = other.model_copy(
            update={"name": "box.cuda2", "clock": datetime.now(UTC) - timedelta(minutes=1)}
        )
        with pytest.raises(ClockSkew):
            agent.join_sibling(late)
    assert second.cluster.labels == {"share-compute-contributor": second.contributor_id}
    assert store.contributors.get(second.contributor_id).sibling_of == first.contributor_id
    with AgentClient(door, second.contributor_id, second.contributor_key) as agent:
        assert agent.heartbeat().state == "joining"
    with (
        AgentClient(door, second.contributor_id, first.contributor_key) as agent,
        pytest.raises(NotAuthorized),
    ):
        agent.heartbeat()
    with AgentClient(door, first.contributor_id, "scc_wrong") as thief, pytest.raises(NotAuthorized):
        thief.join_sibling(late)


def test_a_refused_machine_leaves_the_invite_unused(door: str, store: Store) -> None:
    _, code = store.invites.create()
    ours = local_versions()
    for name, other in {
        "python": "3.11.0",
        "ray": "2.59.0",
        "torch": "2.12.9",
        "share_compute": "9.9.9",
    }.items():
        versions = Versions(**{**ours.model_dump(), name: other})
        with pytest.raises(VersionMismatch) as caught:
            join(door, wanted(code, versions=versions))
        assert caught.value.details == {"name": name, "server": getattr(ours, name), "joining": other}
        assert getattr(ours, name) in (caught.value.hint or "")
    for skew_s in (-40, 40):
        with pytest.raises(ClockSkew, match="40 s"):
            join(door, wanted(code, clock=datetime.now(UTC) + timedelta(seconds=skew_s)))
    patched = Versions(**{**ours.model_dump(), "torch": ours.torch.rsplit(".", 1)[0] + ".99+cu130"})
    assert join(door, wanted(code, versions=patched)).contributor_id


def test_each_invite_that_does_not_open_says_why(door: str, store: Store) -> None:
    with pytest.raises(InviteUnknown):
        join(door, wanted("none"))
    _, code = store.invites.create()
    join(door, wanted(code))
    with pytest.raises(InviteUsed):
        join(door, wanted(code, "grace"))
    _, code = store.invites.create()
    with pytest.raises(Conflict, match="ada"):
        join(door, wanted(code))
    _, code = store.invites.create(expires_in_s=-1)
    with pytest.raises(InviteExpired):
        join(door, wanted(code, "grace"))
    invite, code = store.invites.create()
    store.invites.revoke(invite.id)
    with pytest.raises(InviteRevoked):
        join(door, wanted(code, "grace"))


def test_of_two_joins_with_one_invite_exactly_one_wins(door: str, store: Store) -> None:
    _, code = store.invites.create()
    outcomes: list[str] = []
    start = threading.Barrier(6)

    def run(name: str) -> None:
        start.wait()
        try:
            join(door, wanted(code, name))
        except ShareComputeError as failure:
            outcomes.append(failure.code)
        else:
            outcomes.append("joined")

    threads = [threading.Thread(target=run, args=(f"machine-{index}",)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["invite-used"] * 5 + ["joined"]


def test_the_operator_removes_a_machine(door: str, store: Store, client: Any) -> None:
    joined = join(door, wanted(store.invites.create()[1]))
    assert client.contributor(joined.contributor_id).name == "ada"
    store.contributors.online(joined.contributor_id, node_id="ab", address="192.0.2.7")
    assert client.remove_contributor(joined.contributor_id).state == "draining"
    with AgentClient(door, joined.contributor_id, joined.contributor_key) as agent:
        assert agent.heartbeat().wanted == "leave"
        with pytest.raises(NotAuthorized, match="removed this machine"):
            agent.rejoin()


def test_a_machine_that_comes_online_is_measured(door: str, store: Store, plane: Any, client: Any) -> None:
    tried = threading.Event()

    async def unreachable(contributor_id: str, node_id: str) -> Machine:
        tried.set()
        raise ContributorLost(f"node {node_id} of {contributor_id} is gone", hint="join again")

    context: Context = plane.app.state.context
    context.measurements = Measurements(store, unreachable)
    joined = join(door, wanted(store.invites.create()[1]))
    labels = {LABEL: joined.contributor_id}

    async def nodes() -> list[NodeFacts]:
        resources = {"memory": float(2**30), "CPU": 1.0}
        return [
            NodeFacts(
                node_id="cd",
                address="192.0.2.7",
                port=8000,
                is_alive=True,
                labels=labels,
                resources=resources,
            )
        ]

    context.cluster.nodes = nodes  # type: ignore[union-attr,method-assign]
    with AgentClient(door, joined.contributor_id, joined.contributor_key) as agent:
        assert agent.online(node_id="cd", address="192.0.2.7").state == "probing"
        assert tried.wait(60)
        client.remove_contributor(joined.contributor_id)
        with pytest.raises(Conflict):
            agent.online(node_id="cd", address="192.0.2.7")


def test_a_server_without_a_cluster_lets_nobody_in(plane: Any, store: Store) -> None:
    with pytest.raises(Unavailable, match="without a Ray cluster"):
        join(plane.url, wanted(store.invites.create()[1]))


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(Unavailable, match=r"http://127.0.0.1:1\b"):
        fetch_health("http://127.0.0.1:1")
