"""The run of a sparse model: it places ranges on machines, starts workers, and replaces lost processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError

from share_compute.errors import ContributorLost
from share_compute.lifecycle.attempt_events import CheckpointSaved, Validated
from share_compute.sparse.keys import KeyCache
from share_compute.sparse.messages import decode
from share_compute.sparse.placement import (
    AnnounceServer,
    BackupWhole,
    EndReplica,
    GiveRole,
    PlacementEffect,
    RangeGone,
    ReplicaPlacement,
    ServersOffered,
    StartReplica,
)
from share_compute.sparse.readers.parts import Format
from share_compute.sparse.settings import SparseSettings
from share_compute.sparse.table import RowValues
from share_compute_actors.sparse.checkpoints import (
    CheckpointOptions,
    SavedCheckpoint,
    data_digest,
    newest_checkpoint,
    restore_range,
    save_checkpoint,
)
from share_compute_actors.sparse.files import PARTS, SHARES, DataPart, DataShares, SparseFiles, check_bags
from share_compute_actors.sparse.losses import MOST_LOSSES, ProcessLosses
from share_compute_actors.sparse.measuring import PassMeasuring
from share_compute_actors.sparse.messages import LOADED, REPORT, SETTINGS, WorkerReport
from share_compute_actors.sparse.nodes import alive, living, on_node
from share_compute_actors.sparse.server import SparseServer
from share_compute_actors.sparse.statuses import STATUS_S, ServerStatuses
from share_compute_actors.sparse.suspension import Suspension
from share_compute_actors.sparse.worker import SparseRowsWorker
from share_compute_actors.wire import COUNT, unpack_answer

POLL_S = 0.2
"""Time between two checks of workers and servers, in seconds."""
_PIECE_BYTES = 4 << 20
"""Bytes of rows in one call, so that Ray sends them inline."""
_Task: TypeAlias = Literal["load", "hold", "run"]
RunEvent: TypeAlias = CheckpointSaved | Validated


class _CopiesLost(ContributorLost):
    """All copies of a range were lost. Unlike other errors of its base class, it does not always end the run."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run that do not change the model."""

    checkpoints: CheckpointOptions | None = None
    """Where checkpoints are; the run continues from the newest one. None for no checkpoints."""
    report: Callable[[RunEvent], None] = lambda _: None
    """Is called with each event, in the thread that trains."""
    memory_bytes: int = 2 << 30
    """Size of the minibatches that each worker keeps in memory; the others are in a temporary file."""
    columns: tuple[str, str, str] = ("user", "item", "rating")
    """Columns of user, item and rating."""
    check: Callable[[], None] = lambda: None
    """Is called several times a second while workers read their rows; its errors end the run."""
    validation: tuple[str, ...] = ()
    """Files on which the model is measured after each pass, beside `SparseSettings.validation_fraction`."""


@dataclass(slots=True)
class _Worker:
    """A worker and its machine."""

    machine: str
    actor: Any
    task: _Task = "load"
    call: Any = None
    """The call of the task that is under way, if there is one."""
    restart_at: float | None = None
    """Time at which another process starts; None if there is one."""
    report: WorkerReport | None = None
    """Report of the process that made the last push. It stays when that process is lost."""


class SparseRun:
    """Trains one sparse model on Ray nodes.

    Args:
        settings: settings of the model.
        files: data files of each worker, on this machine, or one list that is divided among all workers.
        kind: format of the files.
        server_nodes: Ray nodes that may hold ranges.
        worker_nodes: Ray nodes on which workers run, in turn.
        source: actor that serves the files as prepared rows (see `fetched`); None if the files are read here.
        options: checkpoints, events, and how data is read.

    Raises:
        UserError: the data cannot be read, or the checkpoint is of another model or of other data.
    """

    def __init__(
        self,
        settings: SparseSettings,
        files: Sequence[Sequence[str]],
        kind: Format,
        server_nodes: Sequence[str],
        worker_nodes: Sequence[str],
        source: Any = None,
        options: RunOptions | None = None,
    ) -> None:
        self.settings = settings
        self.options = options or RunOptions()
        self._packed = SETTINGS.pack(settings)
        self._kind: Format = kind
        self._source = source
        self._store: Any = None
        self._shares = DataShares(())
        self._validation: tuple[DataPart, ...] = ()
        self._files = [list(part) for part in files]
        if source is None:
            self._share_files()
        self._server_nodes, self._worker_nodes = list(server_nodes), list(worker_nodes)
        self._data = ""
        """Digest of the data files."""
        self.saved: SavedCheckpoint | None = None
        """Newest checkpoint."""
        self.notes: tuple[str, ...] = ()
        """Messages about damaged checkpoints."""
        self.returns = 0
        """Number of times that training returned to the newest checkpoint."""
        self._measuring: PassMeasuring | None = None
        self._saver = ThreadPoolExecutor(1, "checkpoints")
        self._saving: Future[SavedCheckpoint | None] | None = None
        self._losses = ProcessLosses()
        self.suspension = Suspension()
        """Lets `train` raise an error soon, after it has saved a checkpoint if this run saves any."""
        self._is_ended = False
        self._find_checkpoint()
        self._start()

    def _share_files(self) -> None:
        """Let an actor on this machine serve the files."""
        here = on_node(ray.get_runtime_context().get_node_id())
        self._store = cast("Any", SparseFiles).options(scheduling_strategy=here).remote()
        workers, columns = self.settings.workers, list(self.options.columns)
        answer = self._store.share.remote(self._files, self._kind, workers, columns)
        self._shares = unpack_answer(SHARES, ray.get(answer), "the server of the data files")
        if self.options.validation:
            answer = self._store.share.remote([list(self.options.validation)], self._kind, 1, columns)
            shares = unpack_answer(SHARES, ray.get(answer), "the server of the data files")
            self._validation = shares.parts[0]

    def _find_checkpoint(self) -> None:
        if self.options.checkpoints is not None:
            self._data = self._data or data_digest(Path(file) for part in self._files for file in part)
            folder = self.options.checkpoints.folder
            self.saved, self.notes = newest_checkpoint(folder, self.settings, self._data)

    def _start(self) -> None:
        """Start all processes, with the newest checkpoint if there is one."""
        self._placement = ReplicaPlacement(self.settings.ranges)
        self.servers: dict[str, Any] = {
            node: cast("Any", SparseServer).options(scheduling_strategy=on_node(node)).remote(self._packed)
            for node in alive(self._server_nodes)
        }
        """Process of each machine that may hold ranges, by node."""
        self._roles: dict[Any, tuple[int, int]] = {}
        """Calls that end when a backup is whole: range and term."""
        self._statuses = ServerStatuses()
        self.workers: list[_Worker] = []
        self._offer()
        nodes = alive(self._worker_nodes)
        for number in range(self.settings.workers):
            machine = nodes[number % len(nodes)]
            self.workers.append(_Worker(machine, self._new_worker(number, machine)))
        loads = [self._load(number) for number in range(len(self.workers))]
        self.loaded = [unpack_answer(LOADED, answer, "a worker") for answer in self._answers(loads)]
        """Rows that each worker read."""
        check_bags(self._shares, [bag for answer in self.loaded for bag in answer.bags])
        holds = [self._hold(number) for number in range(len(self.workers))]
        self.measured_rows = sum(unpack_answer(COUNT, answer, "a worker") for answer in self._answers(holds))
        """Rows on which the model is measured."""

    def _answers(self, calls: list[Any]) -> list[Any]:
        while ray.wait(calls, num_returns=len(calls), timeout=POLL_S)[1]:
            self.options.check()
        return list(ray.get(calls))

    def _hold(self, number: int) -> Any:
        """Make a worker fetch its part of the rows for measurements: whole files, assigned in turn."""
        actor, step = self.workers[number].actor, len(self.workers)
        if self._source is not None:
            files = list(self.options.validation[number::step])
            return actor.hold_prepared.remote(files, self._source)
        parts, columns = PARTS.pack(self._validation[number::step]), list(self.options.columns)
        return actor.hold.remote(parts, self._kind, self._store, columns)

    def _load(self, number: int) -> Any:
        actor, memory_bytes = self.workers[number].actor, self.options.memory_bytes
        if self._source is not None:
            return actor.load_prepared.remote(self._files[number], self._source, memory_bytes)
        parts, columns = PARTS.pack(self._shares.parts[number]), list(self.options.columns)
        return actor.load.remote(parts, self._kind, self._store, memory_bytes, columns)

    def _new_worker(self, number: int, machine: str) -> Any:
        return (
            cast("Any", SparseRowsWorker)
            .options(scheduling_strategy=on_node(machine))
            .remote(self._packed, number)
        )

    def train(self, watch: Callable[[], None] = lambda: None) -> list[WorkerReport]:
        """Train until all workers are done; return their reports.

        If all copies of a range are lost, all processes restart from the newest checkpoint.

        Args:
            watch: called several times a second.

        Raises:
            ContributorLost: all copies of a range were lost, and there is no checkpoint; or the run is suspended.
            UserError: the process of a worker ended too often.
            ShareComputeError: a worker failed, or a checkpoint could not be written.
        """
        while True:
            try:
                return self._train(watch)
            except _CopiesLost as failure:
                self._return_to_checkpoint(failure)

    def _return_to_checkpoint(self, failure: Exception) -> None:
        """Restart all processes from the newest checkpoint, or raise the failure if there is none."""
        self._end_processes()  # first, because a checkpoint may wait for a clock that is now never reached
        if self._measuring is not None:
            self._measuring.close()
        if self._saving is not None:
            self._save_ended(self._saving)
        if self._is_ended:  # the checkpoint is older than the rows that the caller requests
            raise failure
        if self.saved is None or self._losses.count(-1, self.saved.step) >= MOST_LOSSES:
            raise failure
        self._raise_if_suspended(is_over=True)
        self._find_checkpoint()
        self._start()
        self.returns += 1

    def _train(self, watch: Callable[[], None]) -> list[WorkerReport]:
        firsts = self._first_clocks()
        for number in range(len(self.workers)):
            self._begin_run(number, firsts)
        self._measuring = self._begin_measuring(firsts)
        checked = saved = time.monotonic()
        while True:
            reports = [worker.report for worker in self.workers if worker.report is not None]
            if len(reports) == len(self.workers) and self._is_measured():
                return reports
            if self._is_ended:
                return self._end_workers()
            calls = [worker.call for worker in self.workers if worker.call is not None]
            if refs := [*calls, *self._roles]:
                for ref in ray.wait(refs, timeout=POLL_S)[0]:
                    self._ready(ref)
            elif self._measuring is not None:
                self._measuring.wait(POLL_S)
            else:
                time.sleep(POLL_S)
            watch()
            self._restart_when_due()
            self._is_measured()
            now = time.monotonic()
            if now - checked > 5 * POLL_S:
                self._check_servers()
                checked = time.monotonic()
            if self._save_when_due(now - saved):
                saved = time.monotonic()
            self._raise_if_suspended(is_over=False)

    def end(self) -> None:
        """Make `train` return soon, with the present rows."""
        self._is_ended = True

    def _end_workers(self) -> list[WorkerReport]:
        """End the processes of all workers; return their reports, with zeros for workers that do not answer."""
        found = self.reports(timeout_s=STATUS_S)
        if self._measuring is not None:
            self._measuring.close()
            self._measuring = None
        for worker in self.workers:
            ray.kill(worker.actor)
        none = WorkerReport(0, 0, 0.0, 0, 0, is_done=False)
        return [found.get(number, none) for number in range(len(self.workers))]

    def _ready(self, ref: Any) -> None:
        if ref in self._roles:
            number, term = self._roles.pop(ref)
            try:
                is_whole = ray.get(ref)
            except RayActorError:
                return  # the next check finds the lost machine
            if is_whole:
                self._carry_out(self._placement.handle(BackupWhole(number, term)))
            return
        number = next(index for index, worker in enumerate(self.workers) if worker.call == ref)
        worker, name = self.workers[number], f"worker {number}"
        worker.call = None
        try:
            answer = ray.get(ref)
        except RayError as failure:
            self._lose(number, failure)
            return
        match worker.task:
            case "load":
                unpack_answer(LOADED, answer, name)
                worker.task, worker.call = "hold", self._hold(number)
            case "hold":
                unpack_answer(COUNT, answer, name)
                self._begin_run(number, self._first_clocks())
            case "run":
                report = unpack_answer(REPORT, answer, name)
                worker.report = worker.report or report

    def _begin_run(self, number: int, firsts: dict[int, int]) -> None:
        """Make a worker train from the last push that all ranges have."""
        worker = self.workers[number]
        worker.task, worker.call = "run", worker.actor.run.remote(firsts.get(number, 0), *self._actors())

    def _lose(self, number: int, failure: RayError) -> None:
        """Restart a worker whose process was lost, after a delay if this happened before."""
        worker, delay_s = self.workers[number], 0.0
        ray.kill(worker.actor)
        if worker.machine in alive(self._worker_nodes):
            delay_s = self._losses.restart_delay_s(number, self._first_clocks().get(number, 0), failure)
        worker.call, worker.restart_at = None, time.monotonic() + delay_s

    def _restart_when_due(self) -> None:
        for number, worker in enumerate(self.workers):
            if worker.restart_at is not None and worker.restart_at <= time.monotonic():
                self._restart(number)

    def _restart(self, number: int) -> None:
        """Start a new process of a worker, on another machine if possible; it trains once it has its rows."""
        worker = self.workers[number]
        nodes = alive(self._worker_nodes)
        others = [node for node in nodes if node != worker.machine] or nodes
        worker.machine = others[number % len(others)]
        worker.actor, worker.restart_at = self._new_worker(number, worker.machine), None
        worker.task, worker.call = "load", self._load(number)

    def reports(self, timeout_s: float) -> dict[int, WorkerReport]:
        """Return the reports of workers that are done or answer in time, by number."""
        found = {
            number: worker.report for number, worker in enumerate(self.workers) if worker.report is not None
        }
        calls = {
            worker.actor.report.remote(): number
            for number, worker in enumerate(self.workers)
            if number not in found and worker.restart_at is None
        }
        ready = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)[0] if calls else []
        for ref in ready:
            with suppress(RayError):  # it is started again
                found[calls[ref]] = REPORT.unpack(ray.get(ref), f"worker {calls[ref]}")
        return found

    def _first_clocks(self) -> dict[int, int]:
        """Return the number of pushes of each worker that all ranges have."""
        while True:
            try:
                calls = [actor.clocks.remote(index) for index, actor in enumerate(self._actors())]
                found = [dict(clocks) for clocks in ray.get(calls, timeout=STATUS_S)]
            except RayError:
                self._check_servers()  # this raises an error when no copy is left
                time.sleep(POLL_S)
                continue
            return {number: min(each.get(number, 0) for each in found) for number in range(len(self.workers))}

    # -- measurements --------------------------------------------------------------------------------------------------

    def _begin_measuring(self, firsts: dict[int, int]) -> PassMeasuring | None:
        if not self.measured_rows:
            return None
        return PassMeasuring(self.settings, [loaded.minibatches for loaded in self.loaded], firsts)

    def _is_measured(self) -> bool:
        """Report new measurements; return whether all passes were measured."""
        if self._measuring is None:
            return True
        for step, found in self._measuring.results():
            self.options.report(Validated(split="validation", step=step, **asdict(found)))
        if self._measuring.is_done:
            return True
        servers = self._actors()
        self._measuring.use(servers)
        if any(worker.task != "run" or worker.restart_at is not None for worker in self.workers):
            return False  # some worker does not have its rows yet
        if self._measuring.go_on(servers, [worker.actor for worker in self.workers]):
            self._check_servers()
            self._check_workers()
        return False

    def _check_workers(self) -> None:
        """Restart workers that were lost after their last push; a pending call reveals earlier losses."""
        done = [number for number, worker in enumerate(self.workers) if worker.call is None]
        calls = [self.workers[number].actor.report.remote() for number in done]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=STATUS_S)
        for number, call in zip(done, calls, strict=True):
            try:
                ray.get(call, timeout=0)
            except RayError as failure:
                self._lose(number, failure)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _save_when_due(self, passed_s: float) -> bool:
        """Begin a checkpoint if it is time; return whether one began."""
        options = self.options.checkpoints
        if self._saving is not None and self._saving.done():
            self._save_ended(self._saving)
        if options is None or self._saving is not None:
            return False
        if passed_s < options.every_s and not self.suspension.is_wanted:
            return False
        self._saving = self._saver.submit(save_checkpoint, options, self.settings, self._actors(), self._data)
        return True

    def _save_ended(self, saving: Future[SavedCheckpoint | None]) -> None:
        saved, self._saving = saving.result(), None
        if saved is not None:
            self.saved = saved
            self.suspension.is_saved = self.suspension.is_wanted
            self.options.report(
                CheckpointSaved(step=saved.step, path=saved.folder, size_bytes=saved.size_bytes)
            )

    def _raise_if_suspended(self, *, is_over: bool) -> None:
        """Raise the error of a suspension if no checkpoint is awaited.

        Args:
            is_over: whether no further checkpoint can be saved.

        Raises:
            ContributorLost: the run is suspended.
        """
        if not self.suspension.is_wanted:
            return
        is_over = is_over or self.options.checkpoints is None or self.suspension.is_late
        if is_over or self.suspension.is_saved:
            after = f"after step {self.saved.step}" if self.saved is not None else "without a checkpoint"
            raise ContributorLost(f"suspended {after}", hint="it continues by itself")

    # -- servers -------------------------------------------------------------------------------------------------------

    def _actors(self) -> list[Any]:
        return [self.servers[machine] for machine in self._placement.servers if machine is not None]

    @property
    def placed(self) -> list[tuple[str | None, str | None]]:
        """Machines of the server and the backup of each range."""
        return list(zip(self._placement.servers, self._placement.backups, strict=True))

    @property
    def is_settled(self) -> bool:
        """Whether each range has a server and a whole backup."""
        return self._placement.is_settled

    def _offer(self) -> None:
        self._carry_out(self._placement.handle(ServersOffered(tuple(self.servers))))

    def _check_servers(self) -> None:
        """End servers that failed or have not answered for a long time, and place their ranges elsewhere."""
        lost = self._statuses.lost(self.servers)
        for machine in lost:
            self._drop(machine)
        if lost:
            self._offer()

    def _drop(self, machine: str) -> None:
        """End the process of a machine, so that calls that wait for it fail."""
        self._statuses.forget(machine)
        ray.kill(self.servers.pop(machine))

    def _carry_out(self, effects: Sequence[PlacementEffect]) -> None:
        new = set[int]()
        for effect in effects:
            match effect:
                case StartReplica():
                    if effect.is_server:
                        new.add(effect.range)
                        if self.saved is not None:
                            restore_range(self.saved, effect.range, self.servers[effect.machine])
                case GiveRole():
                    backup = self.servers[effect.backup] if effect.backup else None
                    ref = self.servers[effect.server].serve.remote(
                        effect.range, effect.term, backup, is_new=effect.range in new
                    )
                    self._roles[ref] = (effect.range, effect.term)
                case AnnounceServer():
                    for worker in self.workers:
                        worker.actor.replace.remote(effect.range, self.servers[effect.server])
                case EndReplica():
                    pass  # its process is lost, or refuses calls of the earlier term
                case RangeGone():
                    raise _CopiesLost(
                        f"all copies of range {effect.range} were lost",
                        hint="start the job again; give it more machines",
                    )

    def leave(self, node: str) -> bool:
        """Stop using a machine; return False while it has the only copy of a range, or if it is the last machine."""
        if node in self.servers:
            num_living = len(living(self.servers))  # ranges of lost machines must move first
            if num_living < max(2, len(self.servers)) or not self.is_settled:
                return False
            self._drop(node)
            self._offer()
        for nodes in (self._worker_nodes, self._server_nodes):
            if node in nodes and living(each for each in nodes if each != node):
                nodes.remove(node)
        for worker in self.workers:
            if worker.machine == node:
                ray.kill(worker.actor)  # it is started again elsewhere
        return True

    # -- results -------------------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[RowValues]:
        """Yield the weights of all rows, in the order of places, a few MiB at a time.

        Raises:
            ContributorLost: all copies of a range were lost.
        """
        width = self.settings.build_rule().width
        count = max(1, _PIECE_BYTES // (8 + 4 * width))
        for number in range(len(self._placement.servers)):
            first = 0
            while True:
                piece = decode(self._rows(number, first, count), KeyCache(), width)
                yield piece
                first += count
                if len(piece.places) < count:
                    break

    def _rows(self, number: int, first: int, count: int) -> bytes:
        """Return packed rows of a range, read from its backup if its server is lost."""
        while True:
            try:
                return bytes(ray.get(self._actors()[number].rows.remote(number, first, count)))
            except RayActorError:
                roles = list(self._roles)
                for ref in ray.wait(roles, num_returns=len(roles), timeout=0)[0] if roles else ():
                    self._ready(ref)
                self._check_servers()  # it raises an error when no copy is left

    def weights(self) -> RowValues:
        """Return the weights of all rows together, in the order of places."""
        parts = list(self.pieces())
        return RowValues(
            np.concatenate([part.places for part in parts]), np.concatenate([part.values for part in parts])
        )

    def digests(self) -> list[list[tuple[str, int]]]:
        """Return the digest and the length of the log, for the server and the backup of each range."""
        return [
            [
                tuple(ray.get(self.servers[machine].digest.remote(number)))
                for machine in machines
                if machine is not None and machine in self.servers
            ]
            for number, machines in enumerate(self.placed)
        ]

    def close(self) -> None:
        """End all processes."""
        self._end_processes()
        if self._measuring is not None:
            self._measuring.close()
        if self._store is not None:
            ray.kill(self._store)
        self._saver.shutdown()

    def _end_processes(self) -> None:
        for actor in [*self.servers.values(), *(worker.actor for worker in self.workers)]:
            with suppress(RayError):
                ray.kill(actor)
