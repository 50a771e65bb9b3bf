"""Process of a machine that holds servers and backups of ranges."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, ParamSpec, TypeVar

import ray
from ray.exceptions import RayError

from share_compute.errors import ShareComputeError, StaleEpoch, VerificationFailed
from share_compute.sparse.keys import KeyCache, Places, range_bounds
from share_compute.sparse.messages import KeysUnknown, decode, encode, with_list
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
    ReplicaEvent,
    ReplicaSnapshot,
    ResendDue,
    Role,
    RoleGiven,
    SendEntry,
    SendSnapshot,
    SnapshotArrived,
    SnapshotWanted,
)
from share_compute.sparse.rules import UpdateRule
from share_compute.sparse.snapshots import snapshot_bytes, snapshot_of
from share_compute.sparse.table import RangeTable, RowValues
from share_compute_actors.sparse.messages import (
    ENTRY,
    FROZEN,
    PULL,
    PULLED,
    PUSH,
    PUSHED,
    SETTINGS,
    STORED,
    EntryHeader,
    FrozenAnswer,
    FrozenUse,
    PullAnswer,
    PushAnswer,
    PushHeader,
    StoredAnswer,
)
from share_compute_actors.unpickling import refuse_pickles
from share_compute_actors.wire import Content, pack_answer, pack_failure, unpack_answer

Parameters = ParamSpec("Parameters")
T = TypeVar("T")
_RESEND_S = 0.1
"""Time after which entries that the backup has not stored are sent again."""
_log = logging.getLogger(__name__)


def end_process() -> None:
    """End this process at once, so that the run notices the loss of its replicas."""
    os._exit(1)


async def _or_end(work: Awaitable[T]) -> T:
    """Await, and end the process on an unexpected error, because replicas may then be partly changed."""
    try:
        return await work
    except ShareComputeError:
        raise
    except Exception:
        _log.exception("a server of rows ends because of an unexpected error")
        end_process()
        raise


def _ends_process(
    method: Callable[Parameters, Coroutine[Any, Any, T]],
) -> Callable[Parameters, Coroutine[Any, Any, T]]:
    """Let unexpected errors of a method end the process; see `_or_end`."""

    @wraps(method)
    async def ending(*arguments: Parameters.args, **options: Parameters.kwargs) -> T:
        return await _or_end(method(*arguments, **options))

    return ending


@dataclass
class _Frozen:
    """A snapshot that is kept until it is released."""

    snapshot: ReplicaSnapshot
    rule: UpdateRule

    @cached_property
    def content(self) -> bytes:
        """The snapshot as safetensors."""
        return snapshot_bytes(self.snapshot)

    @cached_property
    def table(self) -> RangeTable:
        """The rows of the snapshot."""
        return RangeTable(self.rule, self.snapshot.table)


@dataclass(slots=True)
class _Hosted:
    """A replica in this process, and the calls that wait for it."""

    replica: RangeReplica
    backup: Any = None
    pushes: dict[int, list[tuple[int, asyncio.Future[PushAnswer]]]] = field(default_factory=dict)
    """Pushes that are not on both machines, by worker."""
    pulls: dict[tuple[int, int], list[asyncio.Future[None]]] = field(default_factory=dict)
    """Pulls that wait for slower workers, by worker and clock."""
    roles: list[tuple[int, asyncio.Future[bool]]] = field(default_factory=list)
    """Terms whose backup is not complete yet."""
    backup_lists: set[str] = field(default_factory=set)
    """Digests of lists of places that the backup has."""
    is_resending: bool = False
    """Whether entries will be sent again soon."""
    freezes: dict[tuple[FrozenUse, int], asyncio.Future[None]] = field(default_factory=dict)
    """Snapshots that wait for slower workers, by use and clock."""
    frozen: dict[tuple[FrozenUse, int], _Frozen] = field(default_factory=dict)
    """Snapshots that are kept, by use, and the clock for which they were wanted."""
    failure: ShareComputeError | None = None
    """Reason for which an update could not be applied."""

    def release(self, failure: ShareComputeError) -> None:
        """Let all waiting calls fail."""
        waiting: list[asyncio.Future[Any]] = [future for each in self.pushes.values() for _, future in each]
        waiting += [future for each in self.pulls.values() for future in each]
        waiting += self.freezes.values()
        for future in waiting:
            future.set_exception(failure)
        self.pushes.clear()
        self.pulls.clear()
        self.freezes.clear()
        self.frozen.clear()
        self.settle_roles()

    def settle_roles(self) -> None:
        """Answer the calls that wait for a backup."""
        term = self.replica.term
        is_server = self.replica.role is Role.SERVER
        for each, future in self.roles:
            if each != term or not is_server:
                future.set_result(False)
            elif self.replica.backup_is_whole:
                future.set_result(True)
        self.roles = [each for each in self.roles if not each[1].done()]


@ray.remote(num_cpus=0, max_concurrency=1000)
class SparseServer:
    """Holds replicas of ranges.

    Args:
        settings: a packed `SparseSettings`.
    """

    def __init__(self, settings: bytes) -> None:
        refuse_pickles()
        self._settings = SETTINGS.unpack(settings, "the coordinator")
        self._rule = self._settings.build_rule()
        self._cache = KeyCache()
        self._hosted: dict[int, _Hosted] = {}
        self._restored: dict[int, bytearray] = {}
        """Parts of snapshots in a checkpoint with which ranges begin, by range."""
        self._going_on: set[int] = set()
        """Ranges to which workers send more pushes that had sent their last one before the checkpoint."""
        self._tasks: set[asyncio.Task[None]] = set()

    def _started(self, number: int, role: Role) -> _Hosted:
        log = PushLog(RangeTable(self._rule), self._settings.workers, self._settings.staleness)
        if role is Role.SERVER and number in self._restored:
            snapshot = snapshot_of(bytes(self._restored.pop(number)))
            log = log.restored(replace(snapshot, ended=frozenset()) if number in self._going_on else snapshot)
        self._hosted[number] = _Hosted(RangeReplica(log, 0, role, has_backup=False))
        return self._hosted[number]

    @_ends_process
    async def serve(self, number: int, term: int, backup: Any, *, is_new: bool) -> bool:
        """Become the server of a range; return whether its backup is complete, once this is known.

        One call does everything, because separate calls of one caller may be executed out of order. The backup starts
        with the snapshot.

        Args:
            number: index of the range.
            term: term that begins.
            backup: process that becomes the backup; None if there is none.
            is_new: whether the range has no rows yet.
        """
        hosted = self._started(number, Role.SERVER) if is_new else self._hosted[number]
        hosted.backup, hosted.backup_lists = backup, set()
        self._handle(number, RoleGiven(term, backup is not None))
        if backup is None:
            return False
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        hosted.roles.append((term, future))
        hosted.settle_roles()
        return await future

    async def restore(self, number: int, offset: int, content: bytes, *, go_on: bool = False) -> None:
        """Keep a part of a range's initial snapshot; the caller calls `serve` afterwards.

        Args:
            number: index of the range.
            offset: number of bytes before this part; 0 begins a new snapshot.
            content: the part.
            go_on: whether workers that had sent their last push will send more.

        Raises:
            VerificationFailed: another part was due.
        """
        kept = self._restored.setdefault(number, bytearray()) if offset else bytearray()
        if len(kept) != offset:
            raise VerificationFailed(f"a part of range {number} from byte {offset} came after {len(kept)}")
        kept += content
        self._restored[number] = kept
        if go_on:
            self._going_on.add(number)

    async def freeze(self, number: int, clock: int, use: FrozenUse) -> bytes:
        """Keep a snapshot of a range once all workers have reached a clock; answer with `FrozenAnswer`.

        Args:
            number: index of the range.
            clock: the clock, or 0 for a snapshot now. If all workers have passed the clock, the snapshot has a later
                clock.
            use: purpose of the snapshot.
        """
        try:
            hosted, key = self._server_of(number), (use, clock)
            if clock == 0 or key not in hosted.frozen:
                future = hosted.freezes.setdefault(key, asyncio.get_running_loop().create_future())
                self._handle(number, SnapshotWanted(clock))
                await asyncio.shield(future)
            frozen = hosted.frozen[key]
            size_bytes = len(frozen.content) if use == "checkpoint" else 0
            clocks = tuple(sorted(frozen.snapshot.clocks.items()))
            return pack_answer(FROZEN, FrozenAnswer(size_bytes, clocks))
        except ShareComputeError as failure:
            return pack_failure(failure)

    async def frozen_part(self, number: int, clock: int, offset: int, size: int) -> bytes:
        """Return bytes of a snapshot for a checkpoint; no bytes if the snapshot was released."""
        hosted = self._hosted.get(number)
        frozen = hosted.frozen.get(("checkpoint", clock)) if hosted is not None else None
        return frozen.content[offset : offset + size] if frozen is not None else b""

    async def frozen_rows(self, packed: bytes) -> bytes:
        """Answer with weights of a snapshot that `freeze` kept; see `pull`. Rows that were never touched are 0."""
        try:
            header, content = PULL.unpack(packed, "a worker")
            hosted = self._server_of(header.range)
            frozen = hosted.frozen.get(("measuring", header.clock))
            if frozen is None:
                raise StaleEpoch(f"the snapshot of range {header.range} is not kept any more")
            places = decode(content, KeyCache(), 0).places
            totals = tuple(frozen.table.totals.tolist()) if self._rule.has_totals else ()
            answer = PullAnswer(lacks_keys=False, totals=totals, rows=len(frozen.table))
            rows = encode(RowValues(places, frozen.table.learned(places)), "float32", with_places=True)
            return pack_answer(PULLED, Content(answer, rows))
        except ShareComputeError as failure:
            return pack_failure(failure)

    async def thaw(self, number: int, clock: int, use: FrozenUse) -> None:
        """Release a snapshot, or cancel its request if it does not exist yet."""
        hosted = self._hosted.get(number)
        if hosted is not None:
            if (wish := hosted.freezes.pop((use, clock), None)) is not None:
                wish.set_exception(StaleEpoch(f"the snapshot of range {number} is not wanted any more"))
            hosted.frozen.pop((use, clock), None)

    async def status(self) -> bool:
        """Answer, so that the run knows that this process is alive."""
        return True

    async def clocks(self, number: int) -> list[list[int]]:
        """Return [worker, last stored clock] pairs as lists, because Ray would pickle tuples."""
        return [list(each) for each in sorted(self._hosted[number].replica.log.clocks.items())]

    async def digest(self, number: int) -> list[Any]:
        """Return the digest of a range's rows, and the length of its log."""
        log = self._hosted[number].replica.log
        return [log.table.digest(), log.length]

    async def rows(self, number: int, first: int, count: int) -> bytes:
        """Return the weights of rows of a range after its training; none after the last row.

        Args:
            number: index of the range.
            first: number of rows to skip, in the order of places.
            count: largest number of rows to return.
        """
        table = self._hosted[number].replica.log.table
        places = table.places[first : first + count]
        return encode(RowValues(places, table.weights(places)), "float32", with_places=True)

    # -- calls of workers ----------------------------------------------------------------------------------------------

    @_ends_process
    async def push(self, packed: bytes) -> bytes:
        """Store a push; answer with `PushAnswer` when it is on server and backup."""
        try:
            return pack_answer(PUSHED, await self._push(packed))
        except ShareComputeError as failure:
            return pack_failure(failure)

    async def _push(self, packed: bytes) -> PushAnswer:
        header, content = PUSH.unpack(packed, "a worker")
        hosted = self._server_of(header.range)
        try:
            push = self._decoded(header, content)
        except KeysUnknown:
            return PushAnswer(0, lacks_keys=True)
        future: asyncio.Future[PushAnswer] = asyncio.get_running_loop().create_future()
        hosted.pushes.setdefault(push.worker, []).append((push.clock, future))
        self._handle(header.range, PushArrived(push))
        return await future

    @_ends_process
    async def pull(self, packed: bytes) -> bytes:
        """Answer with the rows of a pull when the bound of staleness allows it."""
        try:
            return pack_answer(PULLED, await self._pull(packed))
        except ShareComputeError as failure:
            return pack_failure(failure)

    async def push_pull(self, push: bytes, pull: bytes) -> list[bytes]:
        """Answer a push and a pull in one call; see `push` and `pull`."""
        return list(await asyncio.gather(self.push(push), self.pull(pull)))

    async def _pull(self, packed: bytes) -> Content:
        header, content = PULL.unpack(packed, "a worker")
        hosted = self._server_of(header.range)
        try:
            self._check_worker(header.worker)
            wanted = decode(content, self._cache, 0)
            self._check_places(header.range, header.worker, wanted.places)
        except KeysUnknown:
            return Content(PullAnswer(lacks_keys=True), b"")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        hosted.pulls.setdefault((header.worker, header.clock), []).append(future)
        self._handle(header.range, PullArrived(header.worker, header.clock))
        await future
        table = hosted.replica.log.table
        weights = RowValues(wanted.places, table.weights(wanted.places, wanted.digest), wanted.digest)
        totals = tuple(table.totals.tolist()) if self._rule.has_totals else ()
        answer = encode(weights, self._settings.value_type, with_places=False)
        return Content(PullAnswer(lacks_keys=False, totals=totals, rows=len(table)), answer)

    def _server_of(self, number: int) -> _Hosted:
        hosted = self._hosted.get(number)
        if hosted is None or hosted.replica.role is not Role.SERVER:
            raise StaleEpoch(f"another machine is the server of range {number}")
        if hosted.failure is not None:
            raise hosted.failure
        return hosted

    def _check_worker(self, worker: int) -> None:
        """Raise VerificationFailed unless a worker of this number exists."""
        if worker >= self._settings.workers:
            raise VerificationFailed(
                f"worker {worker} sent a message, but the job has {self._settings.workers}"
            )

    def _check_places(self, number: int, worker: int, places: Places) -> None:
        """Raise VerificationFailed unless sorted places are in a range."""
        first, stop = range_bounds(number, self._settings.ranges)
        if len(places) and not first <= int(places[0]) <= int(places[-1]) < stop:
            raise VerificationFailed(f"worker {worker} sent places that are not in range {number}")

    def _decoded(self, header: PushHeader, content: bytes | memoryview) -> Push:
        self._check_worker(header.worker)
        update = decode(content, self._cache, self._rule.width)
        self._check_places(header.range, header.worker, update.places)
        return Push(header.worker, header.clock, header.examples, update, header.is_last, header.acknowledged)

    # -- calls of servers ----------------------------------------------------------------------------------------------

    @_ends_process
    async def entry(self, packed: bytes) -> bytes:
        """Store an entry of the log; answer with `StoredAnswer`."""
        try:
            header, content = ENTRY.unpack(packed, "a server")
            if header.push.range not in self._hosted:  # the snapshot has not arrived yet
                return pack_answer(STORED, StoredAnswer(header.term, 0, is_stored=False))
            try:
                push = self._decoded(header.push, content)
            except KeysUnknown:
                return pack_answer(STORED, StoredAnswer(header.term, 0, is_stored=False, lacks_keys=True))
            return self._stored(header.push.range, EntryArrived(header.term, header.number, push))
        except ShareComputeError as failure:
            return pack_failure(failure)

    @_ends_process
    async def snapshot(self, number: int, term: int, content: bytes) -> bytes:
        """Load the whole state of the server; answer with `StoredAnswer`."""
        try:
            snapshot = snapshot_of(content)
            if number not in self._hosted:
                self._started(number, Role.NEW)
            return self._stored(number, SnapshotArrived(term, snapshot))
        except ShareComputeError as failure:
            return pack_failure(failure)

    def _stored(self, number: int, event: EntryArrived | SnapshotArrived) -> bytes:
        effects = self._hosted[number].replica.handle(event)
        if self._hosted[number].replica.role is not Role.SERVER:
            self._hosted[number].release(StaleEpoch(f"another machine is the server of range {number}"))
        for effect in effects:
            stored = effect.stored  # type: ignore[union-attr]  # backups have no other effect
            return pack_answer(STORED, StoredAnswer(stored.term, stored.number, is_stored=True))
        return pack_answer(STORED, StoredAnswer(event.term, 0, is_stored=False))

    # -- effects -------------------------------------------------------------------------------------------------------

    def _handle(self, number: int, event: ReplicaEvent) -> None:
        """Process an event and carry out its effects. If an update cannot be applied, all waiting calls fail."""
        hosted = self._hosted[number]
        try:
            effects = hosted.replica.handle(event)
        except ShareComputeError as failure:
            self._fail(hosted, failure)
            return
        for effect in effects:
            self._carry_out(number, effect)

    def _fail(self, hosted: _Hosted, failure: ShareComputeError) -> None:
        """Answer all present and later calls of a range with an error, because its log can no longer grow."""
        hosted.failure = hosted.failure or failure
        hosted.release(hosted.failure)

    def _carry_out(self, number: int, effect: ReplicaEffect) -> None:
        hosted = self._hosted[number]
        match effect:
            case SendEntry():
                self._begin(self._send_entry(number, effect.entry))
            case SendSnapshot():
                self._begin(self._send_snapshot(number, effect.snapshot))
            case AcknowledgePush():
                answer = PushAnswer(hosted.replica.log.clocks[effect.worker])
                self._answer(hosted, effect.worker, effect.clock, answer)
            case ExpectPush():
                answer = PushAnswer(0, expected=effect.clock)
                waiting = hosted.pushes.get(effect.worker, [])
                self._answer(hosted, effect.worker, max((clock for clock, _ in waiting), default=0), answer)
            case KeepSnapshot():
                frozen = _Frozen(effect.snapshot, self._rule)
                for key in [key for key in hosted.freezes if key[1] == effect.clock]:
                    hosted.frozen[key] = frozen
                    hosted.freezes.pop(key).set_result(None)
            case AnswerPull():
                for future in hosted.pulls.pop((effect.worker, effect.clock), []):
                    future.set_result(None)

    def _answer(self, hosted: _Hosted, worker: int, clock: int, answer: PushAnswer) -> None:
        waiting = hosted.pushes.get(worker, [])
        for each, future in waiting:
            if each <= clock:
                future.set_result(answer)
        hosted.pushes[worker] = [(each, future) for each, future in waiting if each > clock]

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(_or_end(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_entry(self, number: int, entry: EntryArrived) -> None:
        hosted, push = self._hosted[number], entry.push
        header = PushHeader(number, push.worker, push.clock, push.examples, push.is_last, push.acknowledged)
        update, backup = push.update, hosted.backup
        is_known = update.digest in hosted.backup_lists
        content = encode(update, "float32", with_places=not is_known)
        for _ in range(2):
            packed = ENTRY.pack(Content(EntryHeader(entry.term, entry.number, header), content))
            answer = await self._stored_answer(number, backup.entry.remote(packed))
            if answer is None or not answer.lacks_keys:
                break
            content = with_list(content, update.places)
        if answer is None or not answer.is_stored:
            await self._resend(number)
        elif update.digest:
            hosted.backup_lists.add(update.digest)

    async def _send_snapshot(self, number: int, event: SnapshotArrived) -> None:
        backup = self._hosted[number].backup
        answer = await self._stored_answer(
            number, backup.snapshot.remote(number, event.term, snapshot_bytes(event.snapshot))
        )
        if answer is None or not answer.is_stored:
            await self._resend(number)

    async def _resend(self, number: int) -> None:
        """Resend entries that the backup has not stored, for example because an entry overtook an earlier one."""
        hosted = self._hosted[number]
        if hosted.is_resending or hosted.failure is not None:
            return
        hosted.is_resending = True
        await asyncio.sleep(_RESEND_S)
        hosted.is_resending = False
        self._handle(number, ResendDue())

    async def _stored_answer(self, number: int, ref: Any) -> StoredAnswer | None:
        try:
            answer = unpack_answer(STORED, await ref, "the backup")
        except (RayError, StaleEpoch):  # the run notices that a machine was lost, and begins a new term
            return None
        except ShareComputeError as failure:
            self._fail(self._hosted[number], failure)
            return None
        if answer.is_stored:
            self._handle(number, EntriesStored(answer.term, answer.number))
            self._hosted[number].settle_roles()
        return answer
