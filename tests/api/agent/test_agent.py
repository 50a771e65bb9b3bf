"""A contributor's agent, without a Ray node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from share_compute.errors import NotAuthorized
from share_compute.lifecycle.states import ContributorState
from share_compute.specification import parse_job
from share_compute_actors.machine.node import NodeLimits
from share_compute_api.agent.agent import Agent, AgentStatus
from share_compute_api.agent.client import AgentClient
from share_compute_api.agent.joining import JoinOptions
from share_compute_api.connection.identity import Identities
from share_compute_api.schemas.agents import SERVER, ClosedPorts, ClusterAccess, DialReport, DialRequest


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
        if is_released and view.phase == "draining; its shards move to other machines first":
            seen = store.contributors.get(record.id)
            store.contributors.set_state(seen, ContributorState.left, "its owner takes it back")

    within_s = 60.0 if is_released else 0.1
    options = JoinOptions(plane.url, "used", "ada", leave_within_s=within_s)
    views: list[AgentStatus] = []
    with AgentClient(plane.url, record.id, key) as client:
        Agent(options, lambda view: (views.append(view), show(view)), Identities(tmp_path)).leave(client)  # type: ignore[func-returns-value]
    if is_released:
        assert views[-1].contributed is not None
    held = [] if is_released else ["draining; a job still holds it, and loses it"]
    assert phases == ["draining", "draining; its shards move to other machines first", *held, "left"]


class ReachedClient(AgentClient):
    """A client to whose server all ports of this machine are open."""

    def dial(self, wanted: DialRequest) -> DialReport:
        del wanted
        return DialReport(closed=(ClosedPorts(source=SERVER, ports=()),), nodes=())


class Story:
    """An agent whose node is played, and which a test drives where it would sleep.

    Its server has no cluster, so each attempt to come online or to rejoin fails.
    """

    def __init__(self, plane: Any, folder: Path) -> None:
        self.contributors = plane.store.contributors
        self.record, key = self.contributors.join(
            plane.store.invites.create()[1], name="ada", host="h", versions={}, limits={"cpu_threads": 1}
        )
        self.node = SimpleNamespace(
            end=None, node_id="ab", address="127.0.0.1", child=SimpleNamespace(known=list)
        )
        self.phases: list[str] = []
        self._url, self._key, self._folder = plane.url, key, folder
        self._turns: list[Callable[[], object]] = []

    def play(self, *turns: Callable[[], object]) -> None:
        """Let the agent work; call one of ``turns`` instead of each sleep, and remove the machine after the last."""
        self._turns = [*turns, lambda: self.contributors.remove(self.record.id)]
        children: Any = SimpleNamespace(refresh=lambda: None, stop=lambda *_: None)
        agent = Agent(
            JoinOptions(self._url, "used", "ada", address="127.0.0.1", leave_within_s=0.0),
            lambda view: self.phases.append(view.phase),
            Identities(self._folder),
            start=lambda *_, **__: self.node,  # type: ignore[arg-type, return-value]
            sleep=lambda _: self._turns.pop(0)(),  # type: ignore[arg-type, return-value]
        )
        access = ClusterAccess(ray_address="192.0.2.1:6379", token="token", labels={}, environment={})
        with ReachedClient(self._url, self.record.id, self._key) as client:
            with pytest.raises(NotAuthorized, match="the operator removed this machine"):
                agent.work(client, access, NodeLimits(1, 1), children)
            agent.leave(client)
        assert self._turns == []
        assert (
            self.phases[-1] == "left; the operator removed this machine: ask for a new invite and join again"
        )

    def nothing(self) -> None:
        """Change nothing during a sleep."""

    def online(self) -> None:
        self.contributors.online(self.record.id, node_id="ab", address="192.0.2.7")

    def ready(self) -> None:
        if self.contributors.get(self.record.id).state is ContributorState.lost:
            self.contributors.rejoin(self.record.id)
        self.online()
        self.contributors.ready(self.record.id, capacity=[], links=[])

    def lose(self) -> None:
        seen = self.contributors.get(self.record.id)
        self.contributors.set_state(seen, ContributorState.lost, "the server was away")

    def end_node(self) -> None:
        self.node.end = "its raylet ended"

    def start_node(self) -> None:
        self.node.end = None


def kinds(phases: list[str]) -> list[str]:
    """Return the phases of the work: ``waits`` and ``fails`` are those of an attempt to rejoin."""
    ends = {"again": "fails", "s": "waits"}
    begin, end = (
        phases.index("starting the Ray node") + 1,
        phases.index(next(one for one in phases if one.startswith("draining"))),
    )
    return [ends[phase.split()[-1]] if "; trying again" in phase else phase for phase in phases[begin:end]]


def test_a_machine_whose_node_the_server_does_not_know_comes_back(plane: Any, tmp_path: Path) -> None:
    story = Story(plane, tmp_path)
    story.play(story.nothing, story.online)
    assert kinds(story.phases) == ["waits", "fails", "waits", "fails", "being measured"]


def test_a_machine_that_was_ready_rejoins_without_a_wait_once(plane: Any, tmp_path: Path) -> None:
    """After a restart of the server, streams wait for machines that were ready, so these do not wait."""
    story = Story(plane, tmp_path)
    story.play(story.ready, story.lose, story.ready, story.end_node, story.start_node)
    never_ready = ["waits", "fails", "ready"]
    was_ready = ["fails", "waits", "fails", "ready"]  # the second attempt waits
    without_node = ["waits", "fails", "ready"]
    assert kinds(story.phases) == never_ready + was_ready + without_node
