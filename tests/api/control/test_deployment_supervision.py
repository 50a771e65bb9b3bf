"""Deployments with simulated replicas: machines, restarts, and streams that continue when a server dies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.api.playing import Cluster, laid
from tests.api.routes.test_deployments import CONFIG
from tests.isolated import shared_processes
from tests.platform.inference.scheduler.hashed_stages import Row, reference

from share_compute.errors import ContributorLost, Unavailable, UserError
from share_compute.inference.placement import limits_before
from share_compute.inference.scheduler.events import Emitted, Finished, SequenceEvent
from share_compute.inference.scheduler.limits import SchedulerLimits
from share_compute.inference.scheduler.options import Generation, SamplingOptions
from share_compute.lifecycle.computation import Computation
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.deployment_status import Interruption, ServingStatus
from share_compute.lifecycle.states import ContributorState
from share_compute.planning.plan import Bottleneck
from share_compute.planning.report import ServingPrediction
from share_compute.specification import ReplicasSpec, ServeJob
from share_compute.store import ContributorRecord, DeploymentRecord, Store
from share_compute.topology import Topology
from share_compute_actors.inference.assignment import ServingAssignment
from share_compute_actors.inference.scheduler_service import SchedulerService
from share_compute_api.connection.notifier import Notifier
from share_compute_api.control.deployments import serving
from share_compute_api.control.deployments.deployments import DeploymentSupervisor
from share_compute_api.control.deployments.replicas import Slot
from share_compute_api.control.deployments.serving import HURRIED_POLL_S, HURRIED_S, POLL_S, poll_pause_s
from share_compute_api.control.patience import Patience
from share_compute_api.openai.engine import Engines, Stream
from share_compute_api.openai.metrics import PrometheusMetrics
from share_compute_api.openai.ray_engine import RayEngine

WINDOW = 128
LIMITS = SchedulerLimits(
    window_tokens=WINDOW, kv_tokens=1000, max_sequences=4, step_tokens=64, stages=1, max_queued=8
)


class Replica:
    """A server whose stages are a hash."""

    def __init__(self, assignment: ServingAssignment) -> None:
        self.assignment = assignment
        self.topologies = [assignment.topology]
        self.standbys: list[bool] = []
        self.computations: list[Computation] = []
        self.is_closed = False
        self.failure: Exception | None = None
        self.doors = asyncio.Event()
        """Cleared while submissions are on their way."""
        self.doors.set()
        self.num_taken = 0
        self.num_polls = 0
        self._steps_left = 0
        self._news = asyncio.Event()
        self._desk = SchedulerService(limits_before(assignment.spec, WINDOW), self._news.set)
        self._row = Row(LIMITS)
        self._status = ServingStatus(state=DeploymentState.pending, reason="looking")

    def serve(self, *contributor_ids: str) -> None:
        """Report that these machines serve."""
        self._desk.reform(1, LIMITS)
        bottleneck = Bottleneck(kind="compute", where="a", sentence="a computes")
        prediction = ServingPrediction(
            objective="latency",
            plan=laid(*contributor_ids),
            first_token_s=1,
            next_token_s=1,
            request_s=2,
            tokens_per_s=1,
            lower_bound_s=1,
            bottleneck=bottleneck,
            exact=True,
        )
        self._status = ServingStatus(
            state=DeploymentState.ready, reason="serves", prediction=prediction, holds=contributor_ids
        )

    def propose(self, computation: Computation) -> None:
        """Report a measured choice between compiled and eager code."""
        self._status = self._status.model_copy(update={"proposed_computation": computation})

    def interrupt(self, interruption: Interruption) -> None:
        """Report a loss."""
        self._status = self._status.model_copy(update={"interruptions": (interruption,)})

    def stand_still(self) -> None:
        """Report that machines are missing."""
        self._status = self._status.model_copy(update={"state": DeploymentState.degraded, "holds": ()})

    def give_up(self) -> None:
        """Report that no sequence can continue."""
        self._desk.close(Unavailable("its machines are gone", hint="wait"))
        self._news.set()

    def fail(self, reason: str, code: str) -> None:
        self._status = ServingStatus(state=DeploymentState.failed, reason=reason, error={"code": code})

    def die(self) -> None:
        self.failure = ContributorLost("it died")
        self._news.set()

    def take_steps(self, most: int) -> None:
        self._steps_left = most
        self._news.set()

    async def submit(self, generations: Sequence[Generation]) -> None:
        self._require_life()
        # An actor call keeps running after its caller is cancelled.
        await asyncio.shield(asyncio.create_task(self._admit(generations)))

    async def _admit(self, generations: Sequence[Generation]) -> None:
        await self.doors.wait()
        self._desk.submit(generations)
        self.num_taken += len(generations)

    async def cancel(self, sequences: Sequence[int]) -> None:
        self._require_life()
        self._desk.cancel(sequences)

    @property
    def num_queued(self) -> int:
        return self._desk.stats().queued

    async def pull(self, after: int, timeout_s: float) -> list[SequenceEvent]:
        del timeout_s
        while not (events := self._desk.pull(after, 0)):
            self._require_life()
            self._news.clear()
            if not (steps := self._desk.next_steps() if self._steps_left else []):
                await self._news.wait()
            for step in steps:
                self._steps_left -= 1
                self._row.send(step)
                result = self._row.execute(0)
                assert result is not None
                while self._row.fed_back:
                    self._row.deliver_token()
                self._desk.completed(result)
        return events

    async def status(self) -> ServingStatus:
        self._require_life()
        self.num_polls += 1
        return self._status

    async def offer(self, topology: Topology) -> None:
        self._require_life()
        self.topologies.append(topology)

    async def choose_computation(self, computation: Computation) -> None:
        self._require_life()
        self.computations.append(computation)
        self._status = self._status.model_copy(update={"proposed_computation": None})

    async def set_standby(self, *, is_on: bool) -> None:
        self._require_life()
        self.standbys.append(is_on)
        if is_on:
            self._status = ServingStatus(
                state=DeploymentState.pending, reason="no weights", holds=self._status.holds
            )

    async def close(self) -> None:
        self.is_closed = True

    def abandon(self) -> None:
        self.is_closed = True

    def _require_life(self) -> None:
        if self.failure is not None:
            raise self.failure


@dataclass
class House:
    """A store, a supervisor, and the replicas that it started."""

    store: Store
    cluster: Cluster
    folder: Path
    notifier: Notifier = field(default_factory=Notifier)
    engines: Engines = field(default_factory=lambda: Engines(shared_processes()))
    replicas: asyncio.Queue[Replica] = field(default_factory=asyncio.Queue)
    metrics: PrometheusMetrics = field(default_factory=PrometheusMetrics)
    members: dict[str, set[str]] = field(default_factory=dict)
    """By contributor, the jobs and replicas that have members there."""
    supervisor: DeploymentSupervisor = field(init=False)

    async def _members(self) -> dict[str, set[str]]:
        return self.members

    def deploy(self, **wanted: object) -> DeploymentRecord:
        source = {"name": "llama", "model": {"path": str(self.folder)}, **wanted}
        return self.store.deployments.create(ServeJob.model_validate(source), reason="new")

    async def _launch(self, assignment: ServingAssignment) -> Replica:
        replica = Replica(assignment)
        await self.replicas.put(replica)
        return replica

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        supervisor = self.supervisor = DeploymentSupervisor(
            self.store, self.engines, self._launch, self.notifier, self.metrics.serving, self._members, 120.0
        )
        unsubscribe = self.store.on_commit(self.notifier.notify)
        task = asyncio.create_task(supervisor.run())
        try:
            async with asyncio.timeout(240):
                yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            unsubscribe()

    async def until(self, check: Callable[[], bool]) -> None:
        while True:
            ticket = self.notifier.ticket
            if await asyncio.to_thread(check):
                return
            await self.notifier.wait(ticket, 0.05)

    def engine(self) -> RayEngine:
        engine = self.engines.find("llama")
        assert isinstance(engine, RayEngine)
        return engine

    def state(self, record: DeploymentRecord) -> DeploymentState:
        return self.store.deployments.get(record.id).state

    def leased(self) -> set[str]:
        return {machine.id for machine in self.store.contributors.list() if machine.deployment_id}


def run(store: Store, tmp_path: Path, story: Callable[[House], Awaitable[None]]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    async def main() -> None:
        house = House(store, Cluster(store, tmp_path, Patience()), tmp_path)
        async with house.running():
            await story(house)

    asyncio.run(main())


def wanted(sequence: int, tokens: int = 30) -> Generation:
    options = SamplingOptions(seed=sequence, max_tokens=tokens)
    return Generation(sequence=sequence, owner="key", prompt=(1, 2, sequence), options=options)


async def read(stream: Stream, tokens: dict[int, list[int]]) -> dict[int, str]:
    """Read a stream to its end into ``tokens``, by sequence; return why each sequence ended."""
    reasons: dict[int, str] = {}
    async for events in stream:
        for event in events:
            if isinstance(event, Finished):
                reasons[event.sequence] = event.reason
            else:
                assert isinstance(event, Emitted)
                known = tokens.setdefault(event.sequence, [])
                assert event.index == len(known)
                known.append(event.token)
    return reasons


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ("none", "no machine is there; let machines join"),
        ("joining", "no machine is ready, 1 is about to be"),
        ("busy", "no machine is free: 1 in training"),
    ],
)
def test_the_reason_says_whether_machines_are_busy_or_about_to_be_ready_or_none_is_there(
    store: Store, tmp_path: Path, there: str, expected: str
) -> None:
    async def story(house: House) -> None:
        def reason() -> str:
            return house.store.deployments.get(record.id).reason

        if there == "busy":
            store.jobs.begin(house.cluster.submit(), [house.cluster.contributor("ada")])
        elif there == "joining":
            house.cluster.join("ada")
        record = house.deploy()
        await house.until(lambda: reason() == expected)

    run(store, tmp_path, story)


def test_a_stream_goes_on_when_its_server_dies(store: Store, tmp_path: Path) -> None:
    async def story(house: House) -> None:
        record = house.deploy()
        first = await house.replicas.get()
        assert first.assignment.topology.contributors == ()
        ada, grace = house.cluster.contributor("ada"), house.cluster.contributor("grace")
        await house.until(lambda: house.leased() == {ada, grace})
        await house.until(lambda: len(first.topologies[-1].contributors) == 2)
        first.serve(ada)
        await house.until(lambda: house.state(record) is DeploymentState.ready)
        assert house.store.deployments.get(record.id).plans == (laid(ada),)
        generations = [wanted(one) for one in range(3)]
        stream = await house.engine().generate(generations)
        tokens: dict[int, list[int]] = {}
        reading = asyncio.create_task(read(stream, tokens))
        first.take_steps(12)
        await house.until(lambda: len(tokens) == 3 and all(len(each) >= 8 for each in tokens.values()))
        first.die()
        # Requests that arrive meanwhile wait for the next server. Cancelled ones are not started there.
        late, unwanted = wanted(7), wanted(8)
        stream = await house.engine().generate([late, unwanted])
        stream.complete(unwanted.sequence)
        reading_late = asyncio.create_task(read(stream, tokens))
        second = await house.replicas.get()
        assert first.is_closed
        second.serve(ada)
        second.take_steps(1000)
        assert await reading == dict.fromkeys(range(3), "length")
        assert await reading_late == {late.sequence: "length"}
        assert tokens == {one.sequence: reference(one, WINDOW)[0] for one in [*generations, late]}
        # The deployment's events report the interruption, and that the streams continue.
        reported = [event.data for event in house.store.events.after(0, deployment_id=record.id)]
        (died,) = [data["interrupted"] for data in reported if "interrupted" in data]
        assert (died["number"], died["machines"]) == (1, [])
        assert "server died" in died["reason"]
        (end,) = [data["went_on"] for data in reported if "went_on" in data]
        assert end["seconds"] == end["ago_s"] > 0

    run(store, tmp_path, story)


def test_all_replicas_compute_as_the_first_one_proposed(store: Store, tmp_path: Path) -> None:
    first, other = (
        Computation(is_compiled=is_compiled, gain=1.5, sentence="measured") for is_compiled in (True, False)
    )

    async def story(house: House) -> None:
        record = house.deploy(compile="auto", replicas=2)
        replicas = [await house.replicas.get() for _ in range(2)]
        assert [one.assignment.computation for one in replicas] == [None, None]
        for replica, proposed in zip(replicas, (first, other), strict=True):
            replica.propose(proposed)
            await house.until(lambda replica=replica: replica.computations == [first])
        assert house.store.deployments.get(record.id).computation == first
        replicas[0].die()
        assert (await house.replicas.get()).assignment.computation == first

    run(store, tmp_path, story)


def test_a_client_that_vanishes_while_its_request_is_placed_leaves_nothing(
    store: Store, tmp_path: Path
) -> None:
    async def story(house: House) -> None:
        ada = house.cluster.contributor("ada")
        record = house.deploy()
        replica = await house.replicas.get()
        replica.serve(ada)
        await house.until(lambda: house.state(record) is DeploymentState.ready)
        engine = house.engine()
        replica.doors.clear()
        client = asyncio.create_task(engine.generate([wanted(1)]))
        await house.until(lambda: engine.ongoing(replica) == 1)
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
        for _ in range(20):  # events that can overtake the submission do so now
            await asyncio.sleep(0)
        replica.doors.set()
        await house.until(lambda: replica.num_taken == 1)
        await house.until(lambda: engine.ongoing(replica) == replica.num_queued == 0)
        assert client.cancelled()

    run(store, tmp_path, story)


def test_machines_that_a_replica_loses_are_events(store: Store, tmp_path: Path) -> None:
    async def story(house: House) -> None:
        house.cluster.contributor("ada")
        record = house.deploy()
        replica = await house.replicas.get()
        replica.serve("con-1")
        await house.until(lambda: house.state(record) is DeploymentState.ready)
        # The interruption lasted for less than the interval between two polls.
        replica.interrupt(
            Interruption(number=1, reason="lost birch", machines=("birch",), ago_s=0.2, seconds=0.1)
        )

        def reported() -> list[str]:
            events = house.store.events.after(0, deployment_id=record.id)
            return [part for event in events for part in ("interrupted", "went_on") if part in event.data]

        await house.until(lambda: reported() == ["interrupted", "went_on"])

    run(store, tmp_path, story)


def test_who_takes_it_down_frees_its_machines(store: Store, tmp_path: Path) -> None:
    async def story(house: House) -> None:
        ada = house.cluster.contributor("ada")
        record = house.deploy()
        replica = await house.replicas.get()
        await house.until(lambda: house.leased() == {ada})
        # No job can lease the machine meanwhile.
        assert house.store.contributors.get(ada).is_leased
        replica.serve(ada)
        await house.until(lambda: house.state(record) is DeploymentState.ready)
        stream = await house.engine().generate([wanted(1)])
        house.store.deployments.stop(record.id)
        with pytest.raises(Unavailable, match="not served any more"):
            await read(stream, {})
        await house.until(lambda: not house.leased())
        assert house.engines.find("llama") is None
        assert replica.is_closed

    run(store, tmp_path, story)


def test_a_draining_machine_is_not_given_to_the_replica_again(store: Store, tmp_path: Path) -> None:
    async def story(house: House) -> None:
        machine = house.cluster.contributor("ada")
        house.deploy()
        replica = await house.replicas.get()
        await house.until(lambda: len(replica.topologies[-1].contributors) == 1)
        store.contributors.leave(machine)
        await house.until(lambda: not house.leased())
        await house.until(lambda: not replica.topologies[-1].contributors)

    run(store, tmp_path, story)


def test_a_deployment_comes_back_with_the_next_server(store: Store, tmp_path: Path) -> None:
    async def story(house: House) -> None:
        ada = house.cluster.contributor("ada")
        record = house.deploy()
        (await house.replicas.get()).serve(ada)
        await house.until(lambda: house.state(record) is DeploymentState.ready)

    async def next_attempt(house: House) -> None:
        (record,) = house.store.deployments.list()
        replica = await house.replicas.get()
        await house.until(lambda: house.state(record) is DeploymentState.pending)
        replica.serve("con-1")
        await house.until(lambda: house.state(record) is DeploymentState.ready)

    run(store, tmp_path, story)
    run(store, tmp_path, next_attempt)


def test_a_machine_that_comes_back_with_members_of_the_replica_is_given_to_it_again(
    store: Store, tmp_path: Path
) -> None:
    async def story(house: House) -> None:
        ada, bob = house.cluster.join("ada"), house.cluster.join("bob")
        record = house.deploy()
        await house.replicas.get()
        house.members = {ada: {f"{record.id}/0"}, bob: {f"{record.id}/0", "job-other"}}
        for machine in (bob, ada):
            house.cluster.arrive(machine)
        await house.until(lambda: house.leased() == {ada})
        house.members[bob].remove("job-other")
        await house.until(lambda: house.leased() == {ada, bob})

    run(store, tmp_path, story)


def test_a_replica_that_starts_is_polled_more_often_until_it_is_ready(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams wait for it after a restart of the server."""
    assert poll_pause_s(HURRIED_S - 1.0, is_starting=True) == HURRIED_POLL_S
    assert poll_pause_s(HURRIED_S + 1.0, is_starting=True) == POLL_S
    assert poll_pause_s(0.0, is_starting=False) == POLL_S

    async def story(house: House) -> None:
        ada = house.cluster.contributor("ada")
        record = house.deploy()
        replica = await house.replicas.get()
        monkeypatch.setattr(serving, "POLL_S", 1e6)  # no further poll
        await house.until(lambda: replica.num_polls > 3)
        replica.serve(ada)
        await house.until(lambda: house.state(record) is DeploymentState.ready)

    run(store, tmp_path, story)


def test_what_can_never_be_served_fails(store: Store, tmp_path: Path) -> None:
    async def story(house: House) -> None:
        house.cluster.contributor("ada")
        record = house.deploy()
        replica = await house.replicas.get()
        replica.fail("no such architecture", UserError.code)
        await house.until(lambda: house.state(record) is DeploymentState.failed)
        assert house.store.deployments.get(record.id).reason == "no such architecture"
        await house.until(lambda: not house.leased())
        # Failures of other kinds are retried.
        other = house.deploy()
        (await house.replicas.get()).fail("a defect", "internal")
        (await house.replicas.get()).serve("con-1")
        await house.until(lambda: house.state(other) is DeploymentState.ready)

    run(store, tmp_path, story)


def test_a_replica_gives_back_what_it_does_not_use(store: Store, tmp_path: Path) -> None:
    cluster = Cluster(store, tmp_path, Patience())
    ada, grace, alan = (cluster.contributor(name) for name in ("ada", "grace", "alan"))

    def present() -> dict[str, ContributorRecord]:
        states = (ContributorState.ready, ContributorState.draining)
        return {machine.id: machine for machine in store.contributors.list(states)}

    slot = Slot(stages=2)
    assert slot.wants(present().values())
    slot.give([ada, grace, alan], -100.0)
    # Reading the model may take any time: the replica has not tried to use the machines yet.
    slot.see(ServingStatus(state=DeploymentState.pending, reason="", is_reading_model=True), -90.0)
    assert slot.settle(present(), 0.0) == frozenset()
    assert slot.machines == {ada, grace, alan}
    loading = ServingStatus(state=DeploymentState.loading, reason="", holds=(ada, grace))
    slot.see(loading, 1.0)
    assert slot.settle(present(), 10.0) == frozenset()
    assert slot.machines == {ada, grace, alan}
    # The third machine was not used for a long time: it is released when it is certain that it has no members.
    assert slot.settle(present(), 40.0) == frozenset()
    assert slot.machines == {ada, grace}
    assert slot.settle(present(), 41.0) == {alan}
    assert not slot.wants(present().values())
    barbara = cluster.contributor("barbara")
    assert slot.wants(present().values())
    # A machine whose owner wants it back waits for the handover, but not without limit.
    slot.give([barbara], 42.0)
    store.contributors.leave(ada)
    assert slot.settle(present(), 43.0) == frozenset()
    assert slot.machines == {grace, barbara}
    assert slot.settle(present(), 50.0) == frozenset()
    assert slot.settle(present(), 80.0) >= {ada}


def test_machines_are_reserved_for_the_next_request(store: Store, tmp_path: Path) -> None:
    async def story(house: House) -> None:
        used, _ = (house.cluster.contributor(name) for name in "ab")
        record = house.deploy(
            replicas={"min": 0, "max": 1, "downscale_to_zero_delay_s": 0.2, "reserve": True},
            parallelism={"stages": 1},
        )
        replica = await house.replicas.get()
        await house.until(lambda: len(replica.topologies[-1].contributors) == 2)
        replica.serve(used)
        await house.until(lambda: replica.standbys == [True])
        await house.until(
            lambda: house.store.deployments.get(record.id).reason.startswith("no replica is up")
        )
        assert house.state(record) is DeploymentState.ready
        assert used in house.leased()
        assert not replica.is_closed

        # A server that dies meanwhile is replaced by one that only keeps the members.
        replica.die()
        replica = await house.replicas.get()
        assert replica.assignment.is_standby
        assert used in {machine.id for machine in replica.assignment.topology.contributors}

        tokens: dict[int, list[int]] = {}
        reading = asyncio.create_task(read(await house.engine().generate([wanted(1)]), tokens))
        await house.until(lambda: replica.standbys == [False])
        replica.serve(used)
        replica.take_steps(100)
        assert await reading == {1: "length"}
        assert tokens == {1: reference(wanted(1), WINDOW)[0]}
        assert house.replicas.empty()

        # Another range ends the reservation.
        await house.until(lambda: replica.standbys == [False, True])
        house.store.deployments.set_replicas(record.id, ReplicasSpec(reserve=False, max=1, min=0))
        await house.until(lambda: replica.is_closed and not house.leased())

    run(store, tmp_path, story)
