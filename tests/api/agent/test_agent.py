"""A contributor's agent, without a Ray node."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from share_compute.errors import ContributorLost
from share_compute.lifecycle.states import ContributorState
from share_compute.specification import parse_job
from share_compute_actors.machine.node import NodeLimits
from share_compute_actors.machine.processes import ChildProcesses
from share_compute_api.agent.agent import Agent, AgentStatus
from share_compute_api.agent.client import AgentClient
from share_compute_api.agent.identity import Identities
from share_compute_api.agent.joining import JoinOptions
from share_compute_api.connection.backoff import ExponentialBackoff
from share_compute_api.schemas.agents import ClusterAccess


@pytest.mark.parametrize("is_released", [True, False])
def test_who_leaves_waits_until_its_work_is_handed_over_but_not_for_ever(
    plane: Any, digits: dict[str, Any], tmp_path: Path, *, is_released: bool
) -> None:
    store = plane.store
    record, key = store.contributors.join(
        store.invites.create()[1], name="ada", host="h", versions={}, limits={"cpu_threads": 1}
    )
    store.contributors.online(record.id, node_id="ab", address="192.0.2.7")
    store.contributors.ready(record.id, capacity=[], links=[])
    job = store.jobs.create(parse_job(digits))
    store.jobs.begin(job.id, [record.id])
    phases: list[str] = []

    def show(view: AgentStatus) -> None:
        phases.append(view.phase)
        if is_released and view.phase == "leaving; its shards move to other machines first":
            seen = store.contributors.get(record.id)
            store.contributors.set_state(seen, ContributorState.left, "its owner takes it back")

    within_s = 60.0 if is_released else 0.1
    options = JoinOptions(plane.url, "used", "ada", leave_within_s=within_s)
    with AgentClient(plane.url, record.id, key) as client:
        Agent(options, show, Identities(tmp_path))._leave(client)
    held = [] if is_released else ["leaving; a job still holds it, and loses it"]
    assert phases == ["leaving", "leaving; its shards move to other machines first", *held, "left"]


def test_a_machine_whose_node_the_server_does_not_know_comes_back(plane: Any, tmp_path: Path) -> None:
    store = plane.store
    record, key = store.contributors.join(
        store.invites.create()[1], name="ada", host="h", versions={}, limits={"cpu_threads": 1}
    )
    agent = Agent(JoinOptions(plane.url, "used", "ada"), lambda _: None, Identities(tmp_path))
    agent._children = ChildProcesses(tmp_path)
    agent._node = SimpleNamespace(end=None, node_id="ab", address="192.0.2.7")
    access = ClusterAccess(ray_address="192.0.2.1:6379", token="token", labels={}, environment={})
    with AgentClient(plane.url, record.id, key) as client:
        with pytest.raises(ContributorLost):  # this server has no cluster, so it never learns of nodes
            agent._come_online(client, access, NodeLimits(1, 1))
        with pytest.raises(ContributorLost):
            agent._heartbeat(client)
        store.contributors.online(record.id, node_id="ab", address="192.0.2.7")
        assert agent._heartbeat(client).state is ContributorState.probing


def test_a_machine_that_was_ready_rejoins_without_a_wait_once(plane: Any, tmp_path: Path) -> None:
    """After a restart of the server, streams wait for machines that were ready, so these do not wait."""
    store, phases = plane.store, list[str]()
    record, key = store.contributors.join(
        store.invites.create()[1], name="ada", host="h", versions={}, limits={"cpu_threads": 1}
    )
    options = JoinOptions(plane.url, "used", "ada")
    agent = Agent(options, lambda view: phases.append(view.phase), Identities(tmp_path))
    agent._children = ChildProcesses(tmp_path)
    agent._backoff = ExponentialBackoff(0.001, 0.001)
    agent._node = SimpleNamespace(end=None, node_id="ab", address="192.0.2.7")
    store.contributors.online(record.id, node_id="ab", address="192.0.2.7")
    store.contributors.ready(record.id, capacity=[], links=[])
    lost = ContributorLost("the server was away", hint="it connects again by itself")

    def waits() -> list[bool]:
        """Return, for two attempts to rejoin, whether each waited."""
        found = []
        for _ in range(2):
            phases.clear()
            agent._recover(client, NodeLimits(1, 1), lost, time.monotonic())
            found.append(any("trying again in" in phase for phase in phases))
        return found

    with AgentClient(plane.url, record.id, key) as client:
        assert waits() == [True, True]  # it was never ready
        agent._show_work(agent._heartbeat(client))
        assert waits() == [False, True]
        agent._show_work(agent._heartbeat(client))
        agent._node.end = "its raylet ended"
        assert waits() == [True, True]
