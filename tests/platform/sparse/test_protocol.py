"""The protocol of ranges, under drawn schedules of losses, repetitions and delays."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from share_compute.errors import VerificationFailed
from share_compute.sparse.keys import cuts, places_of
from share_compute.sparse.placement import (
    AnnounceServer,
    BackupWhole,
    EndReplica,
    GiveRole,
    PlacementEffect,
    RangeGone,
    ReplicaLost,
    ReplicaPlacement,
    ServersOffered,
    StartReplica,
)
from share_compute.sparse.replica import (
    AcknowledgePush,
    AnswerPull,
    EntriesStored,
    EntryArrived,
    ExpectPush,
    KeepSnapshot,
    PullArrived,
    Push,
    PushArrived,
    PushLog,
    RangeReplica,
    ReplicaEffect,
    ResendDue,
    Role,
    RoleGiven,
    SendEntry,
    SendSnapshot,
    SendStored,
    SnapshotWanted,
)
from share_compute.sparse.rules import AdaGradRows
from share_compute.sparse.table import RangeTable, RowValues
from share_compute.sparse.worker import (
    ComputeUpdate,
    DropPush,
    PushAcknowledged,
    PushExpected,
    RowsPulled,
    SendPull,
    SendPush,
    ServerReplaced,
    SparseWorker,
    UpdateComputed,
    WorkerEffect,
)

PLACES = np.sort(places_of(np.arange(40, dtype=np.uint64)))


def empty_log(workers: int, staleness: int | None) -> PushLog:
    return PushLog(RangeTable(AdaGradRows(2, seed=1)), workers, staleness)


@dataclass
class Recording(PushLog):
    """A log that also remembers its entries, to count and to replay them."""

    entries: list[Push] = field(default_factory=list)

    def append(self, push: Push) -> None:
        self.entries.append(push)
        super().append(push)

    def restored(self, snapshot: Any) -> Recording:
        plain = super().restored(snapshot)
        again = Recording(plain.table, plain.workers, plain.staleness, plain.length)
        again.clocks, again.ended, again.waiting = plain.clocks, plain.ended, plain.waiting
        again.entries = list(World.histories[id(snapshot)])
        return again

    def snapshot(self) -> Any:
        made = super().snapshot()
        World.histories[id(made)] = list(self.entries)
        World.kept.append(made)
        return made


class World:
    """Workers, replicas and a group, with a network that loses, repeats and delays messages between them.

    Args:
        seed: of the schedule.
        losses: number of replicas and workers to lose.
    """

    histories: dict[int, list[Push]] = {}  # noqa: RUF012
    kept: list[Any] = []  # noqa: RUF012

    def __init__(
        self,
        seed: int,
        *,
        workers: int = 3,
        ranges: int = 2,
        machines: int = 4,
        clocks: int = 6,
        staleness: int | None = 1,
        losses: int = 4,
        drop: float = 0.1,
    ) -> None:
        self.draw = random.Random(seed)
        self.workers, self.ranges, self.clocks, self.staleness = workers, ranges, clocks, staleness
        self.drop, self.losses = drop, losses
        self.replicas: dict[tuple[int, str], RangeReplica] = {}
        self.peers: dict[tuple[int, str], str | None] = {}
        self.servers: dict[int, str] = {}
        self.network: list[tuple[str, Any, Any]] = []
        self.acknowledged: set[tuple[int, int, int]] = set()
        self.stalest = 0.0
        self.group = ReplicaPlacement(ranges)
        self.spare = [f"m{number}" for number in range(machines, machines + losses)]
        self.machines = tuple(f"m{number}" for number in range(machines))
        self.protocol: list[SparseWorker] = []
        self.carry_out_group(self.group.handle(ServersOffered(self.machines)))
        for worker in range(workers):
            self.protocol.append(SparseWorker(ranges, clocks, pulls_ahead=staleness != 0))
            self.carry_out_worker(worker, self.protocol[worker].begin())

    # -- effects ---------------------------------------------------------------------------------------------------

    def carry_out_group(self, effects: list[PlacementEffect]) -> None:
        for effect in effects:
            match effect:
                case StartReplica():
                    role = Role.SERVER if effect.is_server else Role.NEW
                    log = Recording(RangeTable(AdaGradRows(2, seed=1)), self.workers, self.staleness)
                    self.replicas[effect.range, effect.machine] = RangeReplica(
                        log, effect.term, role, has_backup=False
                    )
                case GiveRole():
                    self.peers[effect.range, effect.server] = effect.backup
                    if effect.backup:
                        self.peers[effect.range, effect.backup] = effect.server
                    self.to_replica(
                        effect.range, effect.server, RoleGiven(effect.term, effect.backup is not None)
                    )
                case AnnounceServer():
                    self.servers[effect.range] = effect.server
                    for worker, protocol in enumerate(self.protocol):
                        self.carry_out_worker(worker, protocol.handle(ServerReplaced(effect.range)))
                case EndReplica():
                    pass  # the old replica continues, as behind a cut link, and must do no harm
                case RangeGone():
                    raise AssertionError("a range was lost although only one machine at a time was lost")

    def to_replica(self, number: int, machine: str, event: Any) -> None:
        replica = self.replicas.get((number, machine))
        if replica is not None:
            self.carry_out_replica(number, machine, replica.handle(event))

    def carry_out_replica(self, number: int, machine: str, effects: list[ReplicaEffect]) -> None:
        peer = self.peers.get((number, machine))
        for effect in effects:
            match effect:
                case SendEntry() if peer:
                    self.send("replica", (number, peer), effect.entry)
                case SendSnapshot() if peer:
                    self.send("replica", (number, peer), effect.snapshot)
                case SendStored() if peer:
                    self.send("stored", (number, peer), effect.stored)
                case AcknowledgePush():
                    self.send("worker", effect.worker, (PushAcknowledged(number, effect.clock), None))
                    self.check_durable(number, effect.worker, effect.clock)
                case ExpectPush():
                    self.send(
                        "worker",
                        effect.worker,
                        (PushExpected(number, effect.clock, effect.acknowledged), None),
                    )
                case AnswerPull():
                    replica = self.replicas[number, machine]
                    if self.servers[number] == machine:
                        slowest = replica.log.slowest
                        self.stalest = max(self.stalest, effect.clock - slowest)
                    self.send("worker", effect.worker, (RowsPulled(number, effect.clock), None))

    def check_durable(self, number: int, worker: int, clock: int) -> None:
        self.acknowledged.add((number, worker, clock))

    def carry_out_worker(self, worker: int, effects: list[WorkerEffect]) -> None:
        for effect in effects:
            match effect:
                case SendPull():
                    self.send("server", effect.range, PullArrived(worker, effect.clock))
                case ComputeUpdate():
                    self.send("worker", worker, (UpdateComputed(effect.clock), None))
                case SendPush():
                    push = replace(
                        self.push(worker, effect.clock, effect.range), acknowledged=effect.acknowledged
                    )
                    self.send("server", effect.range, PushArrived(push))
                case DropPush():
                    pass

    def push(self, worker: int, clock: int, number: int) -> Push:
        ends = cuts(PLACES, self.ranges)
        draw = np.random.default_rng((worker, clock))
        touched = np.sort(draw.choice(len(PLACES), 12, replace=False))
        places = PLACES[touched]
        values = draw.normal(size=(12, 2)).astype(np.float32)
        mine = (touched >= ends[number]) & (touched < ends[number + 1])
        return Push(worker, clock, 5, RowValues(places[mine], values[mine]), clock == self.clocks)

    def send(self, kind: str, to: Any, message: Any) -> None:
        is_local = kind == "worker" and isinstance(message[0], UpdateComputed)
        if is_local or self.draw.random() >= self.drop:
            self.network.append((kind, to, message))
            if not is_local and self.draw.random() < self.drop:
                self.network.append((kind, to, message))

    # -- the schedule ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        for _ in range(20_000):
            if all(protocol.is_done for protocol in self.protocol):
                return
            if self.losses and self.draw.random() < 0.02:
                self.lose()
            if not self.network or (len(self.network) < 20 and self.draw.random() < 0.02):
                self.resend()
                continue
            kind, to, message = self.network.pop(self.draw.randrange(min(8, len(self.network))))
            self.deliver(kind, to, message)
        raise AssertionError("the workers did not end")

    def deliver(self, kind: str, to: Any, message: Any) -> None:
        match kind:
            case "replica" | "stored":
                number, machine = to
                self.to_replica(number, machine, message)
                if isinstance(message, EntriesStored) and self.servers.get(number) == machine:
                    self.carry_out_group(self.group.handle(BackupWhole(number, message.term)))
            case "server":
                self.to_replica(to, self.servers[to], message)
            case "worker":
                self.carry_out_worker(to, self.protocol[to].handle(message[0]))

    def resend(self) -> None:
        for (number, machine), _ in list(self.replicas.items()):
            self.to_replica(number, machine, ResendDue())
        for worker, protocol in enumerate(self.protocol):
            for number in range(self.ranges):
                self.carry_out_worker(worker, protocol.handle(ServerReplaced(number)))

    def lose(self) -> None:
        """Lose a machine with its replicas, or a worker's process, if all ranges have a whole backup."""
        if not self.group.is_settled:
            return
        self.losses -= 1
        if self.draw.random() < 0.3:
            worker = self.draw.randrange(self.workers)
            done = [
                self.replicas[number, self.servers[number]].log.clocks.get(worker, 0)
                for number in range(self.ranges)
            ]
            self.network = [each for each in self.network if not (each[0] == "worker" and each[1] == worker)]
            self.protocol[worker] = SparseWorker(
                self.ranges, self.clocks, first_clock=min(done), pulls_ahead=self.staleness != 0
            )
            self.carry_out_worker(worker, self.protocol[worker].begin())
            return
        lost = self.draw.choice(self.machines)
        self.machines = (*(each for each in self.machines if each != lost), self.spare.pop())
        if self.draw.random() < 0.7:  # otherwise it continues behind a cut link
            self.replicas = {key: replica for key, replica in self.replicas.items() if key[1] != lost}
        self.carry_out_group(self.group.handle(ServersOffered(self.machines)))

    def logs(self) -> Iterator[Recording]:
        for number in range(self.ranges):
            log = self.replicas[number, self.servers[number]].log
            assert isinstance(log, Recording)
            yield log


@pytest.fixture(autouse=True)
def forget() -> None:
    World.histories.clear()
    World.kept.clear()


@pytest.mark.parametrize("staleness", [0, 1, 3, None])
def test_each_acknowledged_push_is_applied_once_whatever_is_lost(staleness: int | None) -> None:
    """Servers, backups and workers are lost; messages are lost, repeated and reordered."""
    for seed in range(60):
        World.histories.clear()
        World.kept.clear()
        world = World(seed, staleness=staleness)
        world.run()
        for number, log in enumerate(world.logs()):
            ids = [(push.worker, push.clock) for push in log.entries]
            assert len(ids) == len(set(ids)), f"seed {seed}: a push was applied twice"
            assert {(number, *each) for each in ids} >= {
                each for each in world.acknowledged if each[0] == number
            }, f"seed {seed}: an acknowledged push is missing"
            assert len(ids) == world.workers * world.clocks
            again = empty_log(world.workers, staleness)
            for push in log.entries:
                again.append(push)
            assert again.table.digest() == log.table.digest(), f"seed {seed}: the replay has other bits"
        if staleness is not None:
            assert world.stalest <= staleness


def test_synchronous_workers_give_the_same_bits_in_any_schedule() -> None:
    def digests(seed: int, losses: int) -> list[str]:
        world = World(seed, staleness=0, losses=losses)
        world.run()
        return [log.table.digest() for log in world.logs()]

    expected = digests(0, 0)
    for seed in range(1, 40):
        assert digests(seed, 3) == expected


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_the_bound_of_staleness_is_never_exceeded(staleness: int) -> None:
    """A pull after c pushes shows all pushes of all workers up to c - staleness, and is answered in the end."""
    empty = RowValues(PLACES[:0], np.zeros((0, 2), np.float32))
    for seed in range(1000):
        draw = random.Random(seed)
        workers, clocks = draw.randint(2, 4), draw.randint(1, 6)
        replica = RangeReplica(empty_log(workers, staleness), 1, Role.SERVER, has_backup=False)
        done, may_push = [0] * workers, [True] * workers
        while any(may_push):
            worker = draw.choice([each for each in range(workers) if may_push[each]])
            done[worker] += 1
            is_last = done[worker] == clocks
            effects = replica.handle(PushArrived(Push(worker, done[worker], 1, empty, is_last)))
            may_push[worker] = False
            effects += replica.handle(PullArrived(worker, done[worker]))
            for effect in effects:
                if isinstance(effect, AnswerPull):
                    running = [done[each] for each in range(workers) if done[each] < clocks]
                    assert effect.clock - min(running, default=clocks) <= staleness
                    may_push[effect.worker] = done[effect.worker] < clocks
        assert done == [clocks] * workers


def test_a_server_acknowledges_nothing_before_its_backup_has_it() -> None:
    replica = RangeReplica(empty_log(1, None), 1, Role.SERVER, has_backup=False)
    replica.handle(RoleGiven(2, has_backup=True))
    push = Push(0, 1, 1, RowValues(PLACES[:1], np.ones((1, 2), np.float32)))
    effects = replica.handle(PushArrived(push))
    assert [type(effect) for effect in effects] == [SendEntry]
    assert replica.log.length == 0
    assert replica.handle(EntriesStored(1, 1)) == [], "an earlier term has no say"
    assert replica.handle(EntriesStored(2, 1)) == [AcknowledgePush(0, 1)]
    assert replica.handle(PushArrived(push)) == [AcknowledgePush(0, 1)], (
        "a repeated push is only acknowledged"
    )
    assert replica.log.length == 1


def test_a_missing_push_is_named() -> None:
    replica = RangeReplica(empty_log(1, None), 1, Role.SERVER, has_backup=False)
    push = Push(0, 3, 1, RowValues(PLACES[:1], np.ones((1, 2), np.float32)))
    assert replica.handle(PushArrived(push)) == [ExpectPush(0, 1, 0)]


def test_the_next_pull_is_sent_before_a_minibatch_is_computed() -> None:
    worker = SparseWorker(1, 3, pulls_ahead=True)
    assert worker.begin() == [SendPull(0, 0)]
    assert worker.handle(RowsPulled(0, 0)) == [SendPull(0, 1), ComputeUpdate(1)]
    assert worker.handle(RowsPulled(0, 1)) == [], "it computes"
    assert worker.handle(UpdateComputed(1)) == [SendPush(0, 1, 0), SendPull(0, 2), ComputeUpdate(2)]
    assert worker.handle(RowsPulled(0, 1)) == [], "an answer that was used is ignored"
    assert worker.handle(ServerReplaced(0)) == [SendPush(0, 1, 0), SendPull(0, 2)]
    assert worker.handle(UpdateComputed(2)) == [SendPush(0, 2, 0)]
    assert worker.handle(RowsPulled(0, 2)) == [], "two pushes are not acknowledged"
    assert worker.handle(PushAcknowledged(0, 1)) == [DropPush(1), ComputeUpdate(3)], "no minibatch follows"


def test_a_worker_finds_that_an_acknowledged_push_was_lost() -> None:
    worker = SparseWorker(1, 5, first_clock=2)
    with pytest.raises(VerificationFailed, match="lost push 2"):
        worker.handle(PushExpected(0, 2, 2))


def test_a_retired_server_answers_nothing() -> None:
    replica = RangeReplica(empty_log(1, None), 1, Role.SERVER, has_backup=False)
    other = RangeReplica(empty_log(1, None), 1, Role.SERVER, has_backup=False)
    [snapshot] = other.handle(RoleGiven(5, has_backup=True))
    assert isinstance(snapshot, SendSnapshot)
    entry = EntryArrived(5, 1, Push(0, 1, 1, RowValues(PLACES[:1], np.ones((1, 2), np.float32))))
    assert replica.handle(entry) == [], "it lacks what was before the entry"
    assert replica.role is Role.RETIRED
    assert replica.handle(PullArrived(0, 0)) == []
    assert replica.handle(snapshot.snapshot) == [SendStored(EntriesStored(5, 0))]
    role: Role = replica.role  # mypy assumes that it is still the role above
    assert role is Role.BACKUP, "it may be the backup of the new server"
    assert replica.handle(entry) == [SendStored(EntriesStored(5, 1))]


def test_a_snapshot_is_of_the_clock_that_was_wanted() -> None:
    """The backup stores several entries at once, but the snapshot has only those of the wanted clock."""
    replica = RangeReplica(empty_log(2, 0), 1, Role.SERVER, has_backup=False)
    replica.handle(RoleGiven(2, has_backup=True))
    replica.handle(EntriesStored(2, 0))
    assert replica.handle(SnapshotWanted(2)) == []
    row = RowValues(PLACES[:1], np.ones((1, 2), np.float32))
    for clock in (1, 2, 3):
        for worker in (0, 1):
            replica.handle(PushArrived(Push(worker, clock, 1, row)))
    effects = replica.handle(EntriesStored(2, 6))
    [kept] = [effect for effect in effects if isinstance(effect, KeepSnapshot)]
    assert kept.clock == 2
    assert kept.snapshot.clocks == {0: 2, 1: 2}
    assert kept.snapshot.waiting == ()
    assert kept.snapshot.table.counters.examples == 4
    assert [type(each) for each in replica.handle(SnapshotWanted(1))] == [KeepSnapshot], "it is past already"


def test_losing_server_and_whole_backup_in_one_event_is_reported() -> None:
    group = ReplicaPlacement(1)
    effects = group.handle(ServersOffered(("a", "b", "c")))
    term = max(effect.term for effect in effects if isinstance(effect, GiveRole))
    group.handle(BackupWhole(0, term))
    effects = group.handle(ServersOffered(("c",)))
    assert RangeGone(0) in effects
    assert not any(isinstance(effect, GiveRole) for effect in effects)


def test_losing_server_and_backup_together_is_reported() -> None:
    group = ReplicaPlacement(1)
    group.handle(ServersOffered(("a", "b")))
    effects = group.handle(ReplicaLost(0, "a"))
    assert RangeGone(0) in effects, "the backup was not whole yet"


def test_ranges_are_spread_over_machines() -> None:
    group = ReplicaPlacement(4)
    group.handle(ServersOffered(("a", "b", "c", "d")))
    assert sorted(group.servers, key=str) == ["a", "b", "c", "d"]
    assert sorted(group.backups, key=str) == ["a", "b", "c", "d"]
