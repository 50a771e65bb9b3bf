"""Protocol of one range: its server and its backup, as state machines (state, event) -> effects.

The server gives each push a number in its log and sends it to the backup. When the backup has stored the push, the
server applies and acknowledges it. So each acknowledged push, and each push that a pull can see, is on two machines. A
backup that becomes the server has the whole log. Workers resend unacknowledged pushes, and the new server ignores
pushes that it already has.

Each change of a range's server or backup has a number, the term. The group assigns terms in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from enum import Enum

from share_compute.sparse.table import RangeTable, RowValues, TableSnapshot, summed


@dataclass(frozen=True, slots=True)
class Push:
    """An update of one worker to one range. Worker and clock are its id."""

    worker: int
    clock: int
    """Number of the push among those of the worker, from 1."""
    examples: int
    """Rows of data that the update is a sum over."""
    update: RowValues
    is_last: bool = False
    """Whether the worker sends no further push, so that no merge or pull waits for one."""
    acknowledged: int = 0
    """Last push that the worker knows to be acknowledged."""


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """All that a new backup needs."""

    length: int
    """Length of the log."""
    clocks: dict[int, int]
    """Last clock of each worker in the log."""
    ended: frozenset[int]
    waiting: tuple[Push, ...]
    """Pushes that are in the log and not merged, because others of their clock are missing."""
    table: TableSnapshot


# -- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PushArrived:
    """A worker sent a push to the server."""

    push: Push


@dataclass(frozen=True, slots=True)
class PullArrived:
    """A worker requests rows. Each pull is tied to its own clock, because repeated pulls may arrive late."""

    worker: int
    clock: int
    """Number of pushes that the worker has made."""


@dataclass(frozen=True, slots=True)
class EntryArrived:
    """The server sent an entry of its log to the backup."""

    term: int
    number: int
    push: Push


@dataclass(frozen=True, slots=True)
class SnapshotArrived:
    """The server sent its whole state to a new backup."""

    term: int
    snapshot: ReplicaSnapshot


@dataclass(frozen=True, slots=True)
class EntriesStored:
    """The backup has all entries up to a number."""

    term: int
    number: int


@dataclass(frozen=True, slots=True)
class RoleGiven:
    """The group made this replica the server of a term."""

    term: int
    has_backup: bool
    """Whether there is a backup; without one, pushes are committed at once."""


@dataclass(frozen=True, slots=True)
class ResendDue:
    """Some time has passed: resend the entries that the backup has not stored."""


@dataclass(frozen=True, slots=True)
class SnapshotWanted:
    """A snapshot is requested for the time when all running workers have reached a clock.

    With a staleness of 0, no range then has a push of a later clock. So the snapshots of all ranges at one clock form
    one state of training between two clocks.
    """

    clock: int


ReplicaEvent = (
    PushArrived
    | PullArrived
    | EntryArrived
    | SnapshotArrived
    | EntriesStored
    | RoleGiven
    | ResendDue
    | SnapshotWanted
)


# -- effects -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendEntry:
    """Send an entry to the backup."""

    entry: EntryArrived


@dataclass(frozen=True, slots=True)
class SendSnapshot:
    """Send the server's whole state to its new backup."""

    snapshot: SnapshotArrived


@dataclass(frozen=True, slots=True)
class SendStored:
    """Report to the server which entries the backup has stored."""

    stored: EntriesStored


@dataclass(frozen=True, slots=True)
class AcknowledgePush:
    """Notify a worker that all its pushes up to a clock are on server and backup."""

    worker: int
    clock: int


@dataclass(frozen=True, slots=True)
class ExpectPush:
    """Notify a worker which push is missing before the one that it sent."""

    worker: int
    clock: int
    acknowledged: int
    """Last push that the worker knew to be acknowledged."""


@dataclass(frozen=True, slots=True)
class AnswerPull:
    """Send a worker the rows that it requested."""

    worker: int
    clock: int


@dataclass(frozen=True, slots=True)
class KeepSnapshot:
    """Keep a snapshot that was requested."""

    clock: int
    """Clock for which it was requested."""
    snapshot: ReplicaSnapshot


ReplicaEffect = (
    SendEntry | SendSnapshot | SendStored | AcknowledgePush | ExpectPush | AnswerPull | KeepSnapshot
)


class Role(Enum):
    """Part of a replica in its range."""

    NEW = "new"
    """It has no data yet."""
    BACKUP = "backup"
    SERVER = "server"
    RETIRED = "retired"
    """A later term has another server. A snapshot makes it a backup again."""


@dataclass(slots=True)
class PushLog:
    """The applied part of a range: its rows, and the pushes that they contain.

    Args:
        table: the rows.
        workers: number of workers.
        staleness: bound of the job; with 0, the pushes of a clock are merged.
    """

    table: RangeTable
    workers: int
    staleness: int | None
    length: int = 0
    """Number of entries."""
    clocks: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    waiting: dict[int, list[Push]] = field(default_factory=dict)
    """Pushes that are not merged, by clock."""

    def append(self, push: Push) -> None:
        """Add an entry, and apply all entries that are due. An entry that cannot be applied is not in the log.

        Raises:
            VerificationFailed: an update would give rows that are not finite.
        """
        clocks = {**self.clocks, push.worker: push.clock}
        ended = self.ended | {push.worker} if push.is_last else self.ended
        if self.staleness == 0:
            waiting = {**self.waiting, push.clock: [*self.waiting.get(push.clock, ()), push]}
            slowest = self._slowest(clocks, ended)
            while waiting and slowest >= min(waiting):
                self._merge(waiting.pop(min(waiting)))
            self.waiting = waiting
        else:
            self.table.apply(push.update, push.examples)
        self.length, self.clocks, self.ended = self.length + 1, clocks, ended

    def _merge(self, pushes: list[Push]) -> None:
        pushes.sort(key=lambda push: push.worker)
        total = summed([push.update for push in pushes], self.table.rule.width)
        self.table.apply(total, sum(push.examples for push in pushes))

    @property
    def slowest(self) -> float:
        """Clock that all workers have reached; workers that ended do not count."""
        return self._slowest(self.clocks, self.ended)

    def _slowest(self, clocks: Mapping[int, int], ended: Set[int]) -> float:
        return min(
            (clocks.get(worker, 0) for worker in range(self.workers) if worker not in ended),
            default=float("inf"),
        )

    def admits(self, clock: int) -> bool:
        """Return whether a pull after ``clock`` pushes is within the bound of staleness."""
        return self.staleness is None or clock <= self.slowest + self.staleness

    def snapshot(self) -> ReplicaSnapshot:
        """Return the whole content of the log, in its applied form."""
        waiting = tuple(push for pushes in self.waiting.values() for push in pushes)
        return ReplicaSnapshot(
            self.length, dict(self.clocks), frozenset(self.ended), waiting, self.table.snapshot()
        )

    def restored(self, snapshot: ReplicaSnapshot) -> PushLog:
        """Return a log of the same job with the contents of a snapshot."""
        table = RangeTable(self.table.rule, snapshot.table)
        log = PushLog(table, self.workers, self.staleness, snapshot.length)
        log.clocks, log.ended = dict(snapshot.clocks), set(snapshot.ended)
        for push in snapshot.waiting:
            log.waiting.setdefault(push.clock, []).append(push)
        return log


class RangeReplica:
    """Server or backup of a range.

    Args:
        log: the empty log of the range.
        term: first term of the replica.
        role: `Role.SERVER` for the first server of a range, `Role.NEW` for a backup.
        has_backup: whether the server has a backup.
    """

    def __init__(self, log: PushLog, term: int, role: Role, *, has_backup: bool) -> None:
        self.log, self.term, self.role = log, term, role
        self._has_backup = has_backup
        self._backup_has_snapshot = False
        self._open: dict[int, Push] = {}
        """Entries that the backup has not stored, by number."""
        self._newest: dict[int, int] = {}
        """Last clock of each worker among the open entries."""
        self._pulls: set[tuple[int, int]] = set()
        """Worker and clock of each pull that waits."""
        self._wanted: set[int] = set()
        """Clocks for which snapshots are requested."""

    def handle(self, event: ReplicaEvent) -> list[ReplicaEffect]:
        """Process one event, and return the effects to carry out, in order."""
        return list(self._effects(event))

    def _effects(self, event: ReplicaEvent) -> Iterator[ReplicaEffect]:
        is_server = self.role is Role.SERVER
        match event:
            case RoleGiven():
                yield from self._begin_term(event)
            case EntryArrived():
                yield from self._store(event)
            case SnapshotArrived():
                yield from self._restore(event)
            case PushArrived() if is_server:
                yield from self._accept(event.push)
            case PullArrived() if is_server:
                self._pulls.add((event.worker, event.clock))
                yield from self._answers()
            case EntriesStored() if is_server and event.term == self.term:
                self._backup_has_snapshot = True
                yield from self._commit(event.number)
            case SnapshotWanted() if is_server:
                self._wanted.add(event.clock)
                yield from self._due_snapshots()
            case ResendDue() if is_server:
                yield from self._send_open()

    @property
    def is_whole(self) -> bool:
        """Whether this replica may become the server: a new backup first needs its snapshot."""
        return self.role in (Role.BACKUP, Role.SERVER)

    @property
    def backup_is_whole(self) -> bool:
        """Whether the backup of this term has everything that was in the log when the term began."""
        return self._has_backup and self._backup_has_snapshot

    # -- server --------------------------------------------------------------------------------------------------------

    def _begin_term(self, event: RoleGiven) -> Iterator[ReplicaEffect]:
        if event.term <= self.term or not self.is_whole:
            return
        self.term, self.role, self._has_backup = event.term, Role.SERVER, event.has_backup
        self._backup_has_snapshot = False
        yield from self._send_open()
        if not self._has_backup:
            yield from self._commit(self.log.length + len(self._open))

    def _accept(self, push: Push) -> Iterator[ReplicaEffect]:
        stored = self.log.clocks.get(push.worker, 0)
        newest = max(stored, self._newest.get(push.worker, 0))
        if push.clock <= stored:
            yield AcknowledgePush(push.worker, stored)
        elif push.clock > newest + 1:
            yield ExpectPush(push.worker, newest + 1, push.acknowledged)
        elif push.clock == newest + 1:
            number = self.log.length + len(self._open) + 1
            self._open[number] = push
            self._newest[push.worker] = push.clock
            if self._has_backup:
                yield SendEntry(EntryArrived(self.term, number, push))
            else:
                yield from self._commit(number)

    def _send_open(self) -> Iterator[ReplicaEffect]:
        if self._has_backup:
            if not self._backup_has_snapshot:
                yield SendSnapshot(SnapshotArrived(self.term, self.log.snapshot()))
            for number, push in self._open.items():
                yield SendEntry(EntryArrived(self.term, number, push))

    def _commit(self, up_to: int) -> Iterator[ReplicaEffect]:
        """Apply and acknowledge entries that are on both machines."""
        while self.log.length + 1 in self._open and self.log.length < up_to:
            push = self._open.pop(self.log.length + 1)
            self.log.append(push)
            yield AcknowledgePush(push.worker, push.clock)
            yield from self._due_snapshots()
        yield from self._answers()

    def _due_snapshots(self) -> Iterator[ReplicaEffect]:
        for clock in sorted(each for each in self._wanted if each <= self.log.slowest):
            self._wanted.remove(clock)
            yield KeepSnapshot(clock, self.log.snapshot())

    def _answers(self) -> Iterator[ReplicaEffect]:
        for worker, clock in sorted(self._pulls):
            if self.log.admits(clock):
                self._pulls.remove((worker, clock))
                yield AnswerPull(worker, clock)

    # -- backup --------------------------------------------------------------------------------------------------------

    def _enters(self, term: int) -> bool:
        """Return whether a server's message belongs to the newest known term; a former server retires."""
        if term < self.term or (term == self.term and self.role is Role.SERVER):
            return False
        if self.role is Role.SERVER:
            self.role = Role.RETIRED
            self._open.clear()
            self._pulls.clear()
            self._wanted.clear()
        return True

    def _store(self, event: EntryArrived) -> Iterator[ReplicaEffect]:
        if not self._enters(event.term) or self.role is not Role.BACKUP or event.term != self.term:
            return
        if event.number == self.log.length + 1:
            self.log.append(event.push)
        if event.number <= self.log.length:
            yield SendStored(EntriesStored(self.term, self.log.length))

    def _restore(self, event: SnapshotArrived) -> Iterator[ReplicaEffect]:
        if not self._enters(event.term):
            return
        if event.term > self.term or self.role is not Role.BACKUP:
            self.term, self.role = event.term, Role.BACKUP
            self.log = self.log.restored(event.snapshot)
        yield SendStored(EntriesStored(self.term, self.log.length))
