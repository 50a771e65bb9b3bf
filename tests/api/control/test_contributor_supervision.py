"""Contributors are measured, removed and marked as lost, with machines whose answers a test sets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.api.playing import laid
from tests.databases import make_schema, writing

from share_compute.errors import ContributorLost
from share_compute.lifecycle.attempt_events import Measured, Planned
from share_compute.lifecycle.states import ContributorState, JobState
from share_compute.planning.plan import Bottleneck, Prediction
from share_compute.settings import Settings
from share_compute.specification import parse_job
from share_compute.store import ContributorRecord, Store
from share_compute.topology import HEAD, Device, Link
from share_compute_api.cluster.calls import NodeFacts
from share_compute_api.control import AWAY
from share_compute_api.control.machines.contributors import DISAGREEMENT, ContributorSupervisor
from share_compute_api.control.machines.live_topology import live_topology
from share_compute_api.control.machines.machines import Machine
from share_compute_api.control.machines.measuring import AGAIN, Measurements, share_of
from share_compute_api.control.polling import POLL_S

CPU = Device("cpu", "some cpu", 2**30)
LOST_AFTER = timedelta(seconds=8)
ADDRESS = "127.0.0.1"
NOWHERE = "192.0.2.7"
"""An address for documentation, which no machine has."""


class Played:
    """A machine whose answers, and their times, the test sets."""

    def __init__(self, contributor_id: str, node_id: str) -> None:
        self.id = contributor_id
        self.node_id = node_id
        self.devices: asyncio.Future[tuple[Device, ...]] = asyncio.Future()
        self.is_dead = False
        self.peers: list[str] = []
        self.measurements: list[tuple[int, int]] = []
        """Threads to measure with, and threads that others use meanwhile."""

    async def is_alive(self) -> bool:
        return not self.is_dead

    async def probe(self, limits: Mapping[str, Any], beside: int) -> tuple[Device, ...]:
        self.measurements.append((limits["cpu_threads"], beside))
        return await asyncio.shield(self.devices)

    async def measure_links(self, peers: Sequence[tuple[str, Machine]]) -> tuple[Link, ...]:
        self.peers = [peer_id for peer_id, machine in peers if await machine.is_alive()]
        return tuple(Link(self.id, peer_id, 0.001, 1e9) for peer_id in self.peers)

    def kill(self) -> None:
        self.is_dead = True


class Cluster:
    """A store, measurements, and the machines that they started."""

    def __init__(self, settings: Settings) -> None:
        self.now = datetime(2026, 1, 31, 12, tzinfo=UTC)
        make_schema(settings.resolved_database_url)
        self.store = Store(settings.resolved_database_url, clock=lambda: self.now)
        self.started: list[Played] = []
        self.news = asyncio.Condition()
        self.refusal: ContributorLost | None = None
        self.measurements = Measurements(self.store, self.start)
        self.alive: set[str] = set()
        self.address = ADDRESS
        self.addresses: dict[str, str] = {}
        """Addresses of single nodes that differ from `address`."""
        self.heads: set[str] = set()
        self.suspension = timedelta()
        """Time for which the server is suspended while it asks for Ray's nodes the next time."""
        self.resumed = asyncio.Event()
        self.supervisor = ContributorSupervisor(self.store, self.measurements, self.nodes, LOST_AFTER)

    async def nodes(self) -> list[NodeFacts]:
        if self.suspension:
            self.now += self.suspension
            self.suspension = timedelta()
            self.resumed.set()
        return [
            NodeFacts(
                node_id=name,
                address=self.addresses.get(name, self.address),
                port=9,
                is_alive=True,
                labels={},
                resources={"node:__internal_head__": 1.0} if name in self.heads else {},
            )
            for name in self.alive
        ]

    async def start(self, contributor_id: str, node_id: str | None) -> Machine:
        if self.refusal is not None:
            raise self.refusal
        machine = Played(contributor_id, node_id)
        async with self.news:
            self.started.append(machine)
            self.news.notify_all()
        return machine

    def join(self, name: str, **limits: Any) -> str:
        _, code = self.store.invites.create()
        record, _ = self.store.contributors.join(code, name=name, host=name, versions={}, limits=limits)
        return record.id

    def online(self, contributor_id: str, node_id: str = "ab") -> None:
        self.alive.add(node_id)
        self.store.contributors.online(contributor_id, node_id=node_id, address="192.0.2.7")
        self.measurements.begin(contributor_id)

    def arrive(self, name: str, **limits: Any) -> str:
        contributor_id = self.join(name, **limits)
        self.online(contributor_id)
        return contributor_id

    async def ready(self, name: str, **limits: Any) -> tuple[str, Played]:
        """Let a machine join, and measure it."""
        contributor_id = self.arrive(name, **limits)
        machine = await self.machine(contributor_id)
        machine.devices.set_result((CPU,))
        await self.until(contributor_id, "ready")
        return contributor_id, machine

    async def poll(self) -> None:
        """Poll as the server does each second, after all machines have reported, and wait until none is measured."""
        for record in self.store.contributors.list():
            self.store.heartbeats.note(record.id)
        await self.supervisor.poll()
        while any(map(self.measurements.is_measuring, [one.id for one in self.store.contributors.list()])):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def machine(self, contributor_id: str, number: int = 1) -> Played:
        """Return the ``number``-th machine that was started for a contributor, when it is."""

        def found() -> list[Played]:
            return [machine for machine in self.started if machine.id == contributor_id]

        async with self.news:
            await self.news.wait_for(lambda: len(found()) >= number)
        return found()[number - 1]

    async def until(self, contributor_id: str, state: str) -> ContributorRecord:
        while (record := self.store.contributors.get(contributor_id)).state != state:  # noqa: ASYNC110 - a row
            await asyncio.sleep(0.01)
        return record


def run(settings: Settings, story: Callable[[Cluster], Awaitable[None]]) -> None:
    async def main() -> None:
        cluster = Cluster(settings)
        try:
            async with asyncio.timeout(240):
                await story(cluster)
        finally:
            await cluster.measurements.close()
            cluster.store.close()

    asyncio.run(main())


def test_a_contributor_is_measured_and_ready(settings: Settings) -> None:
    async def story(cluster: Cluster) -> None:
        ada = cluster.arrive("ada")
        first = await cluster.machine(ada)
        grace = cluster.arrive("grace")
        first.devices.set_result((CPU,))
        assert (await cluster.until(ada, "ready")).capacity == (CPU,)
        # Both machines are on one host, so the second is probed only when the first is done.
        second = await cluster.machine(grace)
        second.devices.set_result((CPU,))
        await cluster.until(grace, "ready")
        assert sorted(second.peers) == sorted([ada, HEAD])

    run(settings, story)


def test_the_links_to_all_devices_of_the_same_host_are_measured(settings: Settings) -> None:
    async def story(cluster: Cluster) -> None:
        hosts = ["inside"] * 6 + ["outside"] * 6
        for index, host in enumerate([*hosts, "inside"]):
            last, machine = await cluster.ready(f"machine-{index}", host_id=host.encode().hex())
        ids = {record.id: record.host_id for record in cluster.store.contributors.list()}
        inside = {one for one, host in ids.items() if host == b"inside".hex() and one != last}
        assert inside < set(machine.peers)
        assert len(set(machine.peers) - inside - {HEAD}) == 4

    run(settings, story)


def test_of_two_measurements_of_one_machine_the_later_counts(settings: Settings) -> None:
    async def story(cluster: Cluster) -> None:
        ada = cluster.arrive("ada")
        first = await cluster.machine(ada)
        cluster.online(ada, "cd")
        second = await cluster.machine(ada, 2)
        assert (first.is_dead, second.node_id) == (True, "cd")
        first.devices.set_result(())
        second.devices.set_result((CPU,))
        assert (await cluster.until(ada, "ready")).capacity == (CPU,)
        assert not second.is_dead
        await cluster.supervisor.poll()
        assert cluster.store.contributors.get(ada).state == "ready"

    run(settings, story)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (ContributorLost("its node is gone", hint="join again"), "its node is gone"),
        (ValueError("no JSON"), "it could not be measured: ValueError"),
    ],
)
def test_who_cannot_be_measured_is_given_up(settings: Settings, failure: Exception, reason: str) -> None:
    async def story(cluster: Cluster) -> None:
        ada = cluster.arrive("ada")
        machine = await cluster.machine(ada)
        machine.devices.set_exception(failure)
        assert (await cluster.until(ada, "lost")).reason == reason
        assert machine.is_dead

    run(settings, story)


def test_who_measures_what_no_machine_can_have_is_given_up(settings: Settings) -> None:
    async def story(cluster: Cluster) -> None:
        ada = cluster.arrive("ada")
        machine = await cluster.machine(ada)
        machine.devices.set_result((Device("cpu", "odd", 2**30, {"float32": float("nan")}),))
        lost = await cluster.until(ada, "lost")
        assert "flops_per_s.float32 of odd" in lost.reason
        assert lost.capacity is None

    run(settings, story)


def test_who_cannot_be_started_is_given_up(settings: Settings) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.refusal = ContributorLost("its node is gone", hint="join again")
        assert (await cluster.until(cluster.arrive("ada"), "lost")).reason == "its node is gone"

    run(settings, story)


def test_who_could_not_even_be_given_up_does_not_stay_in_probing(settings: Settings) -> None:
    async def story(cluster: Cluster) -> None:
        ada = cluster.arrive("ada")
        machine = await cluster.machine(ada)
        with writing(cluster.store) as session:
            session.connection().exec_driver_sql("ALTER TABLE events RENAME TO away")
        machine.devices.set_exception(ValueError())
        while cluster.measurements.is_measuring(ada):  # noqa: ASYNC110 - tells nobody
            await asyncio.sleep(0.01)
        with writing(cluster.store) as session:
            session.connection().exec_driver_sql("ALTER TABLE away RENAME TO events")
        await cluster.supervisor.poll()
        assert cluster.store.contributors.get(ada).state == "probing"
        cluster.now += timedelta(seconds=31)
        cluster.store.heartbeats.note(ada)
        await cluster.supervisor.poll()
        assert cluster.store.contributors.get(ada).reason == "the server did not measure it"

    run(settings, story)


def test_the_wait_for_ones_turn_is_no_part_of_the_time_to_measure(settings: Settings) -> None:
    async def story(cluster: Cluster) -> None:
        async def start(contributor_id: str, node_id: str | None) -> Machine:
            """Start a machine; all but the first one answer at once."""
            is_first = not cluster.started
            machine = await cluster.start(contributor_id, node_id)
            if not is_first:
                cluster.started[-1].devices.set_result((CPU,))
            return machine

        cluster.measurements = Measurements(cluster.store, start, timeout_s=6.0)
        both = [cluster.arrive("ada"), cluster.arrive("grace")]
        async with cluster.news:
            await cluster.news.wait_for(lambda: cluster.started)
        unresponsive = cluster.started[0].id
        (other,) = set(both) - {unresponsive}
        await cluster.until(other, "ready")
        assert "within 6 s" in (await cluster.until(unresponsive, "lost")).reason

    run(settings, story)


def test_a_node_that_was_measured_keeps_its_figures(settings: Settings) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.measurements = Measurements(cluster.store, cluster.start, actor_after_s=0.5)
        ada, measured = await cluster.ready("ada")
        before = cluster.store.contributors.get(ada)
        cluster.now += timedelta(seconds=30)
        cluster.store.contributors.rejoin(ada)
        again = cluster.store.contributors.online(ada, node_id="ab", address="192.0.2.7")
        assert again.state == "probing"
        cluster.measurements.begin(ada, keeps_figures=True)
        after = await cluster.until(ada, "ready")
        assert (after.capacity, after.links, after.measured_at) == ((CPU,), before.links, before.measured_at)
        assert [one for one in cluster.started if one.id == ada] == [measured]
        started = await cluster.machine(ada, 2)
        assert (measured.is_dead, started.is_dead, started.measurements) == (True, False, [])

    run(settings, story)


def test_a_dead_head_is_replaced(settings: Settings) -> None:
    async def story(cluster: Cluster) -> None:
        ada = cluster.arrive("ada")
        (await cluster.machine(ada)).devices.set_result((CPU,))
        await cluster.until(ada, "ready")
        (await cluster.machine(HEAD)).is_dead = True
        grace = cluster.arrive("grace")
        machine = await cluster.machine(grace)
        machine.devices.set_result((CPU,))
        await cluster.until(grace, "ready")
        assert HEAD in machine.peers
        assert not (await cluster.machine(HEAD, 2)).is_dead

    run(settings, story)


def test_who_is_gone_is_missed(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    async def story(cluster: Cluster) -> None:
        dead, leaving, waiting = cluster.join("dead"), cluster.join("leaving"), cluster.join("waiting")
        cluster.store.contributors.online(dead, node_id="cd", address="192.0.2.7")
        cluster.store.contributors.online(leaving, node_id="ab", address="192.0.2.7")
        cluster.store.contributors.leave(leaving)
        cluster.alive = {"ab"}
        await cluster.supervisor.poll()
        states = [cluster.store.contributors.get(one).state for one in (dead, leaving, waiting)]
        assert states == ["lost", "left", "joining"]
        messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert messages == ["contributor dead is lost: its Ray node is dead or does not answer"]
        cluster.now += timedelta(seconds=181)
        await cluster.supervisor.poll()
        assert "did not come up" in cluster.store.contributors.get(waiting).reason

    run(settings, story)


async def two_ready(cluster: Cluster) -> tuple[str, str]:
    ada, grace = cluster.join("ada"), cluster.join("grace")
    for name, contributor_id in (("ab", ada), ("cd", grace)):
        cluster.alive.add(name)
        cluster.store.contributors.online(contributor_id, node_id=name, address=NOWHERE)
        cluster.store.contributors.ready(contributor_id, capacity=(CPU,), links=())
    await cluster.supervisor.poll()
    return ada, grace


def test_dead_links_are_measured_again(settings: Settings) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.measurements = Measurements(cluster.store, cluster.start, relink_s=0)
        cluster.supervisor = ContributorSupervisor(
            cluster.store, cluster.measurements, cluster.nodes, LOST_AFTER
        )
        other, _ = await cluster.ready("ada")
        linked, machine = await cluster.ready("grace")
        assert other in machine.peers
        cluster.store.contributors.relink(linked, [Link.dead(linked, other)])
        cluster.alive.add("ab")
        while any(link.is_dead for link in cluster.store.contributors.get(linked).links or ()):
            await cluster.supervisor.poll()
            await asyncio.sleep(0.01)
        links = cluster.store.contributors.get(linked).links
        assert links is not None
        assert sorted(link.target for link in links) == sorted([HEAD, other])

    run(settings, story)


def states(cluster: Cluster, *contributors: str) -> list[str]:
    return [cluster.store.contributors.get(one).state.value for one in contributors]


async def assert_that_only_the_unresponsive_is_lost(cluster: Cluster, ada: str, grace: str) -> None:
    cluster.address = NOWHERE
    cluster.now += LOST_AFTER + timedelta(seconds=1)
    cluster.store.heartbeats.note(grace)
    await cluster.supervisor.poll()
    assert states(cluster, ada, grace) == ["lost", "ready"]


def test_a_machine_that_alone_is_unresponsive_is_lost(settings: Settings) -> None:
    async def story(cluster: Cluster) -> None:
        ada, grace = await two_ready(cluster)
        await assert_that_only_the_unresponsive_is_lost(cluster, ada, grace)

    run(settings, story)


def test_a_server_without_heartbeats_that_reaches_nobody_suspects_its_own_network(settings: Settings) -> None:
    async def story(cluster: Cluster) -> None:
        ada, grace = await two_ready(cluster)
        cluster.address = NOWHERE
        cluster.now += timedelta(minutes=5)
        await cluster.supervisor.poll()
        assert states(cluster, ada, grace) == ["ready", "ready"]
        cluster.now += LOST_AFTER
        cluster.store.heartbeats.note(
            grace
        )  # a machine that is back and has sent no heartbeat yet has the usual time for it
        await cluster.supervisor.poll()
        assert states(cluster, ada, grace) == ["ready", "ready"]
        cluster.now += timedelta(seconds=1)
        await cluster.supervisor.poll()
        assert states(cluster, ada, grace) == ["lost", "ready"]

    run(settings, story)


def test_machines_become_unresponsive_one_after_another_when_the_server_is_cut_off(
    settings: Settings,
) -> None:
    async def story(cluster: Cluster) -> None:
        ada, grace = await two_ready(cluster)
        cluster.address = NOWHERE
        cluster.now += timedelta(seconds=2)
        cluster.store.heartbeats.note(grace)  # its last call before the cut
        cluster.now += LOST_AFTER - timedelta(seconds=1)
        await cluster.supervisor.poll()
        assert states(cluster, ada, grace) == ["ready", "ready"]

    run(settings, story)


def test_a_machine_beside_the_server_proves_nothing_about_the_network(settings: Settings) -> None:
    async def story(cluster: Cluster) -> None:
        ada, grace = await two_ready(cluster)
        mary = cluster.join("mary")
        cluster.store.contributors.online(mary, node_id="ef", address=ADDRESS)
        cluster.store.contributors.ready(mary, capacity=(CPU,), links=())
        cluster.alive |= {"ef", "head"}
        cluster.heads.add("head")
        cluster.addresses |= {"ab": NOWHERE, "cd": "192.0.2.9"}
        cluster.now += LOST_AFTER + timedelta(seconds=1)
        cluster.store.heartbeats.note(mary)
        await cluster.supervisor.poll()
        assert states(cluster, ada, grace, mary) == ["ready", "ready", "ready"]

    run(settings, story)


def test_machines_that_are_reached_but_unresponsive_are_lost(settings: Settings) -> None:
    async def story(cluster: Cluster) -> None:
        ada, grace = await two_ready(cluster)
        cluster.now += LOST_AFTER + timedelta(seconds=1)
        await cluster.supervisor.poll()
        assert states(cluster, ada, grace) == ["lost", "lost"]

    run(settings, story)


def test_what_an_earlier_server_knew_is_away_until_it_comes_back(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(cluster: Cluster) -> None:
        ada = cluster.join("ada")
        cluster.store.contributors.online(ada, node_id="ab", address="192.0.2.7")
        # The server calls this before it answers the first heartbeat.
        await cluster.supervisor.mark_earlier()
        away = cluster.store.contributors.get(ada)
        assert (away.state, away.reason) == (ContributorState.lost, AWAY)
        supervising = asyncio.create_task(cluster.supervisor.run())
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        cluster.store.contributors.rejoin(ada)
        cluster.online(ada)
        (await cluster.machine(ada)).devices.set_result((CPU,))
        assert (await cluster.until(ada, "ready")).state is ContributorState.ready
        await cluster.supervisor.mark_earlier()
        assert cluster.store.contributors.get(ada).state is ContributorState.ready
        supervising.cancel()

    run(settings, story)


def test_one_that_is_back_at_once_is_measured(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(cluster: Cluster) -> None:
        ada = cluster.arrive("ada")
        await cluster.machine(ada)
        cluster.alive.clear()
        set_state, loop = cluster.store.contributors.set_state, asyncio.get_running_loop()

        async def come_back() -> None:
            cluster.store.contributors.rejoin(ada)
            cluster.online(ada, "cd")

        def set_state_slowly(*changes: Any) -> ContributorRecord | None:
            changed = set_state(*changes)
            asyncio.run_coroutine_threadsafe(come_back(), loop).result()
            return changed

        monkeypatch.setattr(cluster.store.contributors, "set_state", set_state_slowly)
        await cluster.supervisor.poll()
        (await cluster.machine(ada, 2)).devices.set_result((CPU,))
        await cluster.until(ada, "ready")

    run(settings, story)


FASTER = Device("cpu", "some cpu", 2**30, {"float32": 9e10})
ONE_OF_A_HOST = {"host_id": "abcd", "host_threads": 4, "cpu_threads": 4, "device": "cpu"}


def answer_anew(machine: Played, answer: tuple[Device, ...] | Exception) -> None:
    machine.devices = asyncio.Future()
    if isinstance(answer, Exception):
        machine.devices.set_exception(answer)
    else:
        machine.devices.set_result(answer)


def work(cluster: Cluster, contributor_id: str, *, busy_s: float) -> str:
    """Lease a machine to a job that measures how long it computes; its plan says 1 s."""
    layers = [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]
    job = cluster.store.jobs.create(parse_job({"model": {"layers": layers}, "data": {"dataset": "digits"}}))
    plan = laid(contributor_id)
    (stage,) = plan.stages
    member = stage.members[0].model_copy(update={"busy_fraction": 0.5})
    bottleneck = Bottleneck(kind="compute", where="it", sentence="it computes")
    prediction = Prediction(
        lower_bound_s=1.0, bottleneck=bottleneck, exact=False, links_assumed=False, step_s=2.0,
        formula_s=2.0, samples_per_s=1.0, tokens_per_s=1.0,
    )  # fmt: skip
    stage = stage.model_copy(update={"members": (member,)})
    planned = Planned(plan=plan.model_copy(update={"stages": (stage,), "prediction": prediction}))
    cluster.store.jobs.begin(job.id, [contributor_id])
    measured = Measured(
        step=20, predicted_step_s=2.0, measured_step_s=2.0, stages=(), machines={contributor_id: busy_s}
    )
    cluster.store.progress.record(job.id, 1, [planned, measured])
    return job.id


def test_an_idle_machine_is_measured_again_when_its_figures_are_old(settings: Settings) -> None:
    async def story(cluster: Cluster) -> None:
        ada, machine = await cluster.ready("ada")
        answer_anew(machine, (FASTER,))
        cluster.now += AGAIN - timedelta(seconds=1)
        await cluster.poll()
        assert cluster.store.contributors.get(ada).capacity == (CPU,)
        cluster.now += timedelta(seconds=1)
        await cluster.poll()
        record = cluster.store.contributors.get(ada)
        assert (record.state, record.capacity, record.measured_at) == ("ready", (FASTER,), cluster.now)
        assert not machine.is_dead

    run(settings, story)


def test_a_machine_is_measured_again_on_request_but_not_while_it_works(settings: Settings) -> None:
    async def story(cluster: Cluster) -> None:
        ada, machine = await cluster.ready("ada")
        answer_anew(machine, (FASTER,))
        job_id = work(cluster, ada, busy_s=1.0)
        cluster.measurements.want(ada)
        await cluster.poll()
        assert len(machine.measurements) == 1
        cluster.store.jobs.move(job_id, JobState.failed, "it failed", attempt=1)
        await cluster.poll()
        assert cluster.store.contributors.get(ada).capacity == (FASTER,)
        await cluster.poll()
        assert len(machine.measurements) == 2  # once is enough

    run(settings, story)


def test_what_cannot_be_measured_again_keeps_its_figures(settings: Settings) -> None:
    async def story(cluster: Cluster) -> None:
        ada, machine = await cluster.ready("ada")
        answer_anew(machine, ContributorLost("its actor died", hint="none"))
        cluster.measurements.want(ada)
        await cluster.poll()
        record = cluster.store.contributors.get(ada)
        assert (record.state, record.capacity) == ("ready", (CPU,))
        await cluster.poll()
        assert len(cluster.started) == 2  # those of ada and the head: a failed one is repeated after a pause
        cluster.now += timedelta(minutes=1)
        trying = asyncio.create_task(cluster.poll())
        (await cluster.machine(ada, 2)).devices.set_result((FASTER,))
        await trying
        assert cluster.store.contributors.get(ada).capacity == (FASTER,)

    run(settings, story)


@pytest.mark.parametrize(
    ("busy_s", "again"),
    [
        (1.1 * DISAGREEMENT, True),
        (0.9 * DISAGREEMENT, False),
        (1.1 / DISAGREEMENT, False),
        (0.9 / DISAGREEMENT, True),
    ],
)
def test_a_machine_whose_job_disagrees_with_its_figures_is_measured_again(
    settings: Settings, busy_s: float, again: bool
) -> None:
    async def story(cluster: Cluster) -> None:
        ada, machine = await cluster.ready("ada")
        job_id = work(cluster, ada, busy_s=busy_s)
        await cluster.poll()
        assert len(machine.measurements) == 1
        cluster.store.jobs.move(job_id, JobState.failed, "it failed", attempt=1)
        await cluster.poll()
        assert len(machine.measurements) == 1 + again

    run(settings, story)


def test_machines_of_one_host_share_its_processors(settings: Settings) -> None:
    """The first is measured alone with all threads, and again with half of them after another one joined."""

    async def story(cluster: Cluster) -> None:
        ada, first = await cluster.ready("ada", **ONE_OF_A_HOST)
        assert cluster.store.contributors.get(ada).machine().cpu_threads == 4
        grace, second = await cluster.ready("grace", **ONE_OF_A_HOST)
        await cluster.ready("elsewhere", **{**ONE_OF_A_HOST, "host_id": "ef01"})
        await cluster.poll()
        await cluster.poll()
        assert first.measurements == [(4, 0), (2, 2)]
        assert second.measurements == [(2, 2)]
        machines = live_topology(cluster.store.contributors.list()).contributors
        found = {
            machine.id: (machine.cpu_threads, machine.host, machine.host_threads) for machine in machines
        }
        assert found[ada] == found[grace] == (2, "abcd", 4)

    run(settings, story)


@pytest.mark.parametrize(
    ("threads", "processors", "expected"),
    [
        ((1, 1, 1), 2, (1, 1)),  # three machines on two processors: all processors but its own are busy
        ((2, 2, 2), 2, (1, 1)),
        ((2, 2), 16, (2, 2)),  # there are enough
        ((8, 8), 8, (4, 4)),
        ((4,), 8, (4, 0)),
        ((4, 4), 0, (4, 0)),  # not known
    ],
)
def test_a_share_is_an_equal_part_of_the_processors(
    settings: Settings, threads: tuple[int, ...], processors: int, expected: tuple[int, int]
) -> None:
    async def story(cluster: Cluster) -> None:
        for index, lent in enumerate(threads):
            limits = {"host_id": "abcd", "host_threads": processors, "cpu_threads": lent, "device": "cpu"}
            cluster.join(f"machine-{index}", **limits)
        here = cluster.store.contributors.list()
        assert share_of(here[0], here) == expected
        # A machine that computes on a GPU takes no share of the processors.
        on_gpu = here[0].model_copy(
            update={"limits": {**here[0].limits, "device": "cuda", "gpus": ["GPU-1"]}}
        )
        assert share_of(on_gpu, [on_gpu, *here[1:]]) == (on_gpu.lent_threads, 0)

    run(settings, story)


class Pauses:
    """Notes when the supervisor pauses between two checks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sleep, self._begun = asyncio.sleep, asyncio.Event()
        monkeypatch.setattr(asyncio, "sleep", self._noted)

    async def _noted(self, seconds: float) -> None:
        if seconds == POLL_S:
            self._begun.set()
        await self._sleep(seconds)

    async def next(self) -> None:
        """Wait until the next pause begins."""
        self._begun.clear()
        await self._begun.wait()


@pytest.mark.slow
def test_a_server_that_is_suspended_in_the_middle_of_a_check_waits_for_heartbeats(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(cluster: Cluster) -> None:
        pauses = Pauses(monkeypatch)
        supervising = asyncio.create_task(cluster.supervisor.run())
        await pauses.next()  # the check for machines of an earlier server is done; there are none
        ada, grace = await two_ready(cluster)
        joining = cluster.join("lin")
        cluster.suspension = timedelta(minutes=5)
        await cluster.resumed.wait()
        for _ in range(2):  # another check follows
            await pauses.next()
        supervising.cancel()
        assert states(cluster, ada, grace, joining) == ["ready", "ready", "joining"]
        await assert_that_only_the_unresponsive_is_lost(cluster, ada, grace)

    run(settings, story)


def test_a_server_that_was_suspended_first_waits_for_heartbeats(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(cluster: Cluster) -> None:
        pauses = Pauses(monkeypatch)
        supervising = asyncio.create_task(cluster.supervisor.run())
        await pauses.next()
        ada, grace = await two_ready(cluster)
        await pauses.next()  # so that the server is suspended between two polls
        cluster.now += timedelta(minutes=5)
        await pauses.next()
        supervising.cancel()
        assert states(cluster, ada, grace) == ["ready", "ready"]
        await assert_that_only_the_unresponsive_is_lost(cluster, ada, grace)

    run(settings, story)
