"""Process of a worker: it holds rows of data, pulls weights, and pushes updates."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from share_compute.errors import StaleEpoch, UserError
from share_compute.sparse.blocks import Block, Floats, RawRows, block_of, cut_of
from share_compute.sparse.keys import KeyCache
from share_compute.sparse.measuring.tallies import Tally, held_out, merged, tally_bytes, tally_of
from share_compute.sparse.messages import PushFilter, decode, encode, with_list
from share_compute.sparse.minibatches import WorkerRows, streamed_minibatches
from share_compute.sparse.readers.bags import BagCounts, bag_blocks
from share_compute.sparse.readers.kept_blocks import KeptBlocks
from share_compute.sparse.readers.libsvm import libsvm_blocks
from share_compute.sparse.readers.parts import Format
from share_compute.sparse.readers.ratings import ratings_blocks
from share_compute.sparse.table import RowValues, summed
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
from share_compute_actors.group.answering import answers
from share_compute_actors.sparse.files import PARTS, DataPart, remote_part
from share_compute_actors.sparse.messages import (
    LOADED,
    PULL,
    PULLED,
    PUSH,
    PUSHED,
    REPORT,
    SETTINGS,
    TALLY,
    BagPart,
    LoadedAnswer,
    PullHeader,
    PushHeader,
    WorkerReport,
)
from share_compute_actors.sparse.source import fetched
from share_compute_actors.unpickling import refuse_pickles
from share_compute_actors.wire import COUNT, Content, unpack_answer

_POLL_S = 0.2
_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class _Call:
    """A pending call to a server, with a push, a pull or both."""

    range: int
    push: SendPush | None
    pull: SendPull | None
    actor: Any


@ray.remote(num_cpus=0, concurrency_groups={"work": 1, "control": 1, "measuring": 1})
class SparseRowsWorker:
    """Holds a part of the rows, and trains on them.

    Args:
        settings: a packed `SparseSettings`.
        worker: number of the worker.
    """

    def __init__(self, settings: bytes, worker: int) -> None:
        refuse_pickles()
        self._settings = SETTINGS.unpack(settings, "the coordinator")
        self._worker = worker
        self._model = self._settings.build_model()
        self._blocks, self._held = KeptBlocks(0), KeptBlocks(0)
        self._servers: list[Any] = []
        self._replaced: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._filters = [
            PushFilter(self._settings.filter, self._model.width) for _ in range(self._settings.ranges)
        ]
        self._cache = KeyCache()
        self._sent_lists: set[tuple[Any, str]] = set()
        self._pulled: dict[int, tuple[Floats, tuple[float, ...], int]] = {}
        self._pushes: dict[int, list[bytes]] = {}
        self._calls: dict[Any, _Call] = {}
        self._todo: deque[WorkerEffect] = deque()
        self._lock = threading.Lock()
        self._report = WorkerReport(0, 0, 0.0, 0, 0, is_done=False)

    @ray.method(concurrency_group="work")
    @answers(LOADED)
    def load(
        self, parts: bytes, kind: Format, store: Any, memory_bytes: int, columns: Sequence[str]
    ) -> LoadedAnswer:
        """Read parts of files.

        Args:
            parts: packed parts.
            kind: format of the files.
            store: a handle of `SparseFiles`.
            memory_bytes: size of the minibatches that stay in memory; the others are in a temporary file.
            columns: columns of user, item and rating.

        Raises:
            UserError: a file cannot be read.
        """
        bags: list[BagPart] = []
        rows = self._read(PARTS.unpack(parts, "the coordinator"), kind, store, columns, bags)
        return self._keep(rows, memory_bytes)._replace(bags=tuple(bags))

    @ray.method(concurrency_group="work")
    @answers(LOADED)
    def load_prepared(self, files: Sequence[str], source: Any, memory_bytes: int) -> LoadedAnswer:
        """Fetch prepared rows.

        Args:
            files: paths of prepared files on the server.
            source: actor that serves the files; see `fetched`.
            memory_bytes: size of the minibatches that stay in memory.
        """
        return self._keep((fetched(source, file) for file in files), memory_bytes)

    @ray.method(concurrency_group="work")
    @answers(COUNT)
    def hold(self, parts: bytes, kind: Format, store: Any, columns: Sequence[str]) -> int:
        """Read parts of files for measurements, after `load`; return the number of all such rows."""
        bags: list[BagPart] = []
        found = self._read(PARTS.unpack(parts, "the coordinator"), kind, store, columns, bags)
        return self._hold(found)

    @ray.method(concurrency_group="work")
    @answers(COUNT)
    def hold_prepared(self, files: Sequence[str], source: Any) -> int:
        """Fetch prepared rows for measurements, after `load_prepared`; return the number of all such rows."""
        return self._hold(fetched(source, file) for file in files)

    def _hold(self, parts: Iterable[RawRows]) -> int:
        for rows in parts:
            self._add_held(rows)
        return self._held.rows

    def _add_held(self, rows: RawRows) -> None:
        size = self._settings.batch_size
        for start in range(0, len(rows), size):
            part = rows.part(slice(start, start + size))
            self._held.add(block_of(part, with_bias=self._settings.has_bias))

    def _keep(self, parts: Iterable[RawRows], memory_bytes: int) -> LoadedAnswer:
        settings = self._settings
        for kept in (self._blocks, self._held):
            kept.close()
        self._blocks, self._held = KeptBlocks(memory_bytes), KeptBlocks(memory_bytes // 4)
        for block in streamed_minibatches(
            self._trained(parts), settings.batch_size, settings.seed, with_bias=settings.has_bias
        ):
            self._blocks.add(block)
        if not self._blocks.rows:
            raise UserError(
                f"worker {self._worker} has no rows to train on", hint="use fewer workers, or more data"
            )
        return LoadedAnswer(self._blocks.rows, len(self._blocks), self._held.rows)

    def _trained(self, parts: Iterable[RawRows]) -> Iterator[RawRows]:
        """Yield the rows for training, and keep the held-out rows."""
        fraction, seed = self._settings.validation_fraction, self._settings.seed
        for rows in parts:
            if not fraction:
                yield rows
                continue
            is_held = held_out(rows, fraction, seed)
            self._add_held(rows.part(np.flatnonzero(is_held)))
            yield rows.part(np.flatnonzero(~is_held))

    @ray.method(concurrency_group="measuring")
    @answers(TALLY)
    def measure(self, clock: int, *servers: Any) -> Content:
        """Return the `Tally` of the held-out rows of this worker, with the weights of snapshots.

        Args:
            clock: clock for which the servers keep snapshots.
            servers: server of each range.

        Raises:
            StaleEpoch: a server was lost.
        """
        tallies = [self._measured(block, clock, servers) for block in self._held]
        tally = merged(tallies)
        return Content(tally.rows, tally_bytes(tally))

    def _measured(self, block: Block, clock: int, servers: Sequence[Any]) -> Tally:
        calls = []
        for number, part in enumerate(cut_of(block.places, len(servers)).slices):
            places = block.places[part]
            wanted = encode(
                RowValues(places, np.empty((len(places), 0), np.float32)), "float32", with_places=True
            )
            packed = PULL.pack(Content(PullHeader(number, self._worker, clock), wanted))
            calls.append(servers[number].frozen_rows.remote(packed))
        weights, totals, count = list[Floats](), list[tuple[float, ...]](), 0
        for number, call in enumerate(calls):
            try:
                answer = ray.get(call)
            except RayError as failure:
                raise StaleEpoch(f"the server of range {number} was lost") from failure
            header, body = unpack_answer(PULLED, answer, "a server")
            weights.append(decode(body, KeyCache(), self._model.width).values)
            totals.append(header.totals)
            count += header.rows
        sums = np.append(np.sum(totals, axis=0), float(count)) if totals[0] else np.zeros(0)
        return tally_of(self._model, block, np.concatenate(weights), sums)

    def _read(
        self,
        parts: Sequence[DataPart],
        kind: Format,
        store: Any,
        columns: Sequence[str],
        bags: list[BagPart],
    ) -> Iterator[RawRows]:
        for each in parts:
            file, part = Path(each.path), remote_part(store, each)
            if kind == "libsvm":
                yield from libsvm_blocks(file, part=part)
            elif kind == "ratings":
                user, item, rating = columns
                yield from ratings_blocks(file, (user, item, rating), part=part)
            else:
                counts = BagCounts()
                yield from bag_blocks(file, part=part, counts=counts)
                bags.append(BagPart(each.file, counts.entries, counts.first, counts.last))

    @ray.method(concurrency_group="control")
    def replace(self, number: int, server: Any) -> None:
        """Use another server for a range."""
        self._replaced.put((number, server))

    @ray.method(concurrency_group="control")
    def report(self) -> bytes:
        """Return the progress as `WorkerReport`."""
        with self._lock:
            return REPORT.pack(self._report)

    @ray.method(concurrency_group="work")
    @answers(REPORT)
    def run(self, first_clock: int, *servers: Any) -> WorkerReport:
        """Train in all passes; return the last `WorkerReport`.

        Args:
            first_clock: number of pushes that all ranges have from an earlier process of this worker.
            servers: server of each range.
        """
        self._servers = list(servers)
        with self._lock:
            self._report = self._report._replace(clock=first_clock)
        settings = self._settings
        rows = WorkerRows(self._blocks, settings.ranges, settings.passes, settings.seed, self._worker)
        protocol = SparseWorker(
            settings.ranges,
            rows.last_clock,
            first_clock=first_clock,
            window=1 if settings.staleness == 0 else 2,
            pulls_ahead=settings.staleness != 0,
        )
        self._todo.extend(protocol.begin())
        while not protocol.is_done:
            self._use_new_servers(protocol)
            computed = self._carry_out(rows)
            self._take_answers(rows, protocol, must_wait=computed is None)
            if computed is not None:
                # Process answers that arrived meanwhile first, so that the push and the next pull are one call.
                self._todo.extend(protocol.handle(UpdateComputed(computed)))
        with self._lock:
            self._report = self._report._replace(is_done=True)
            return self._report

    def _use_new_servers(self, protocol: SparseWorker) -> None:
        with suppress(queue.Empty):
            while True:
                number, server = self._replaced.get_nowait()
                self._servers[number] = server
                self._todo.extend(protocol.handle(ServerReplaced(number)))

    def _take_answers(self, rows: WorkerRows, protocol: SparseWorker, *, must_wait: bool) -> None:
        """Process the answers that have arrived.

        Args:
            rows: the rows of the worker.
            protocol: the protocol.
            must_wait: whether to wait for an answer, or for a new server, if there is nothing to do.
        """
        if self._calls:
            calls = list(self._calls)
            ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
            if not ready and must_wait and not self._todo:
                ready, _ = ray.wait(calls, timeout=_POLL_S)
            for ref in ready:
                self._answered(ref, self._calls.pop(ref), rows, protocol)
        elif must_wait and not self._todo:
            with suppress(queue.Empty):
                self._replaced.put(self._replaced.get(timeout=_POLL_S))

    def _answered(self, ref: Any, call: _Call, rows: WorkerRows, protocol: SparseWorker) -> None:
        try:
            content = ray.get(ref)
        except RayError:
            return  # the run announces another server
        answers = content if isinstance(content, list) and len(content) == 2 else [content]
        self._count(received=sum(map(len, answers)))
        try:
            events = []
            if call.push is not None:
                events += self._push_answered(answers[0], call, call.push, rows)
            if call.pull is not None:
                events += self._pull_answered(answers[-1], call, call.pull, rows, protocol)
        except StaleEpoch:
            if call.actor != self._servers[call.range]:
                return
            time.sleep(_RETRY_S)  # the new server does not know its role yet
            events = [ServerReplaced(call.range)]
        for event in events:
            self._todo.extend(protocol.handle(event))

    def _push_answered(self, content: bytes, call: _Call, push: SendPush, rows: WorkerRows) -> list[Any]:
        answer = unpack_answer(PUSHED, content, "a server")
        if answer.lacks_keys:
            places = rows.wanted(push.clock, call.range).places
            if push.clock in self._pushes:
                parts = self._pushes[push.clock]
                parts[call.range] = with_list(parts[call.range], places)
                self._todo.append(push)
            return []
        if answer.expected:
            return [PushExpected(call.range, answer.expected, push.acknowledged)]
        return [PushAcknowledged(call.range, answer.acknowledged)]

    def _pull_answered(
        self, content: bytes, call: _Call, pull: SendPull, rows: WorkerRows, protocol: SparseWorker
    ) -> list[Any]:
        if pull.clock != protocol.pull:  # the call was repeated, and its first answer was used
            return []
        header, body = unpack_answer(PULLED, content, "a server")
        if header.lacks_keys:
            wanted = rows.wanted(pull.clock + 1, call.range)
            self._sent_lists.discard((call.actor, wanted.digest))
            self._todo.append(pull)
            return []
        wanted = rows.wanted(pull.clock + 1, call.range)
        self._cache.put(wanted.digest, wanted.places)
        pulled = decode(body, self._cache, self._model.width)
        self._pulled[call.range] = (pulled.values, header.totals, header.rows)
        return [RowsPulled(call.range, pull.clock)]

    def _carry_out(self, rows: WorkerRows) -> int | None:
        """Carry out effects up to the next computation; return its clock, or None if there is no computation."""
        while self._todo:
            match effect := self._todo.popleft():
                case SendPush():
                    if effect.clock in self._pushes:
                        self._send(effect.range, effect, self._pull_beside(effect.range), rows)
                case SendPull():
                    self._send(effect.range, None, effect, rows)
                case ComputeUpdate():
                    self._compute(effect.clock, rows)
                    return effect.clock
                case DropPush():
                    self._pushes.pop(effect.clock, None)
        return None

    def _pull_beside(self, number: int) -> SendPull | None:
        """Take the next effect that sends a pull to a range, to send it in one call with a push."""
        for place, effect in enumerate(self._todo):
            if isinstance(effect, SendPull) and effect.range == number:
                del self._todo[place]
                return effect
        return None

    def _compute(self, clock: int, rows: WorkerRows) -> None:
        ranges = range(self._settings.ranges)
        totals = np.zeros(0)
        if self._pulled[0][1]:
            sums = np.sum([self._pulled[number][1] for number in ranges], axis=0)
            totals = np.append(sums, float(sum(self._pulled[number][2] for number in ranges)))
        weights = [self._pulled[number][0] for number in ranges]
        updates, loss = rows.updates(clock, self._model, weights, totals)
        is_last = clock == rows.last_clock
        contents = []
        for number in ranges:
            update = updates[number]
            if is_last and not self._settings.filter.is_exact:  # nothing stays held back
                update = summed([update, self._filters[number].rest()], self._model.width)
                contents.append(encode(update, "float32", with_places=True))
            else:
                is_known = self._knows(self._servers[number], update.digest)
                contents.append(self._filters[number].push(update, with_places=not is_known))
        self._pushes[clock] = contents
        with self._lock:
            report = self._report
            self._report = report._replace(
                clock=clock, examples=report.examples + rows.block(clock).rows, loss=report.loss + loss
            )

    def _knows(self, server: Any, digest: str) -> bool:
        """Return whether a server has a list of places, and record that it will be sent now."""
        if not self._settings.caches_keys:
            return False
        is_known = (server, digest) in self._sent_lists
        self._sent_lists.add((server, digest))
        return is_known

    def _send(self, number: int, push: SendPush | None, pull: SendPull | None, rows: WorkerRows) -> None:
        server = self._servers[number]
        packed = [self._packed_push(push, rows)] if push is not None else []
        packed += [self._packed_pull(pull, rows)] if pull is not None else []
        self._count(sent=sum(map(len, packed)))
        method = server.pull if push is None else server.push if pull is None else server.push_pull
        self._calls[method.remote(*packed)] = _Call(number, push, pull, server)

    def _packed_pull(self, effect: SendPull, rows: WorkerRows) -> bytes:
        wanted, server = rows.wanted(effect.clock + 1, effect.range), self._servers[effect.range]
        content = encode(wanted, "float32", with_places=not self._knows(server, wanted.digest))
        return PULL.pack(Content(PullHeader(effect.range, self._worker, effect.clock), content))

    def _packed_push(self, effect: SendPush, rows: WorkerRows) -> bytes:
        examples, is_last = rows.block(effect.clock).rows, effect.clock == rows.last_clock
        header = PushHeader(effect.range, self._worker, effect.clock, examples, is_last, effect.acknowledged)
        return PUSH.pack(Content(header, self._pushes[effect.clock][effect.range]))

    def _count(self, sent: int = 0, received: int = 0) -> None:
        with self._lock:
            report = self._report
            self._report = report._replace(
                sent_bytes=report.sent_bytes + sent, received_bytes=report.received_bytes + received
            )
