"""A member: the actor that holds one shard on one contributor, and runs microbatches through this shard."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import psutil
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from share_compute.errors import ShardStoreLost, ShareComputeError, StaleEpoch
from share_compute.protocol.member import MemberMachine
from share_compute.protocol.member_events import Loaded
from share_compute.protocol.membership import Worker
from share_compute.protocol.messages import ToCoordinator, ToMember
from share_compute.protocol.tree import SummationTree
from share_compute.shards import Shard
from share_compute.training.finiteness import NonFiniteValue, first_of
from share_compute.training.shares import WHOLE, OptimizerShare
from share_compute_actors.compiled.artifacts import Artifacts
from share_compute_actors.group.allocator import passing_through, peak_resident_bytes
from share_compute_actors.group.answering import answers
from share_compute_actors.group.failing import FailsOnRequest
from share_compute_actors.group.fetching import SourceClient
from share_compute_actors.group.lifeline import Lifeline
from share_compute_actors.group.linked_member import LinkedMember
from share_compute_actors.machine.device import end_if_lost
from share_compute_actors.machine.reach import Place, unanswered
from share_compute_actors.machine.stalled import close_stalled_connections
from share_compute_actors.messages import (
    EvaluationResult,
    FolderKind,
    MemberSetup,
    MemberStatus,
    Sources,
    StepFigures,
)
from share_compute_actors.training.backups.copies import Copies, RemotePrimary
from share_compute_actors.training.backups.copy_quota import CopyQuota
from share_compute_actors.training.faults import with_faults
from share_compute_actors.training.member.backup_calls import BackupCalls
from share_compute_actors.training.member.compiling import CompilesLayers
from share_compute_actors.training.member.engine import Forming, TrainingEngine
from share_compute_actors.training.member.loading import build_runner, fill_runner
from share_compute_actors.training.member.merging import MergesBranches
from share_compute_actors.training.member.passing import Passing
from share_compute_actors.training.member.reading import GivesState, ShardReader
from share_compute_actors.training.member.runner import Runner
from share_compute_actors.training.member.samples import Rows, ShardSamples
from share_compute_actors.training.member.saving import copied, folder_tensors
from share_compute_actors.training.member.schemas import EVALUATION, FINDING, LOGITS, STATUS, pack_said
from share_compute_actors.training.member.unacknowledged import Unacknowledged
from share_compute_actors.transport.collective.backend import join_group
from share_compute_actors.transport.pieces import PIECE, Piece, Pieces
from share_compute_actors.transport.rendezvous import ChannelStore, Rendezvous
from share_compute_actors.transport.traffic import Traffic
from share_compute_actors.wire import COUNT, FLAG, NAMES, NOTHING

if TYPE_CHECKING:
    from share_compute_actors.training.member.ranks import Ranks


@ray.remote(num_cpus=0, concurrency_groups={"orders": 1, "control": 2, "mail": 2, "pieces": 2, "copies": 2})
class Member(GivesState, BackupCalls, CompilesLayers, MergesBranches, LinkedMember, FailsOnRequest):
    """Runs one machine's part of one job, in all its epochs.

    Methods of the concurrency group ``orders`` do their work on the compute thread, one after the other.
    Most methods of other concurrency groups answer while the compute thread is busy.

    Args:
        setup: parameters of this member.
        coordinator: the coordinator's actor.
        key: secret that the member sends with each message to the coordinator, so that no other member can
            impersonate this member. `follow` replaces the coordinator and the key.
    """

    _setup: MemberSetup
    _engine: TrainingEngine
    _traffic: Traffic

    _last_message_s = 5.0

    def __init__(self, setup: MemberSetup, coordinator: Any, key: bytes) -> None:
        close_stalled_connections()
        self._setup = setup
        self._coordinator = coordinator, key
        self._machine = MemberMachine(setup.worker, setup.applied)
        self._tree = SummationTree(setup.runs, keeps_runs_apart=setup.training.compresses_sums)
        self._traffic = Traffic(setup.worker, setup.limits)
        copies = Copies(
            setup.worker,
            setup.training,
            torch.device(setup.device),
            lambda failure: self._notify(failure, None),
            CopyQuota(setup.lent_bytes),
            partial(RemotePrimary, self._traffic),
        )
        make_engine = with_faults(TrainingEngine, setup.failures, setup.worker)
        on_failure = partial(end_if_lost, setup.device, self._end)
        self._engine = make_engine(self._machine, self._tree, self._notify, copies, on_failure)
        self._own_state = ShardReader(self._engine.copies.of, lambda: self._runner)
        self._runner: Runner | None = None
        """Runner of the current shard; None before the first `adopt`.

        It stays until `adopt` replaces it, because other members may still read its weights."""
        self._next: Runner | None = None
        """Runner that `load` filled and `adopt` has not taken yet; None if there is none."""
        self._next_applied = 0
        """Last step whose update the most recently loaded weights include."""
        self._built: Runner | None = None
        """Runner that `build` made and `load` has not filled yet; None if there is none."""
        self._ranks = self._make_ranks() if setup.ranks > 1 else None
        self._names: dict[Worker, str] = {}
        self._shard_store: Any = None
        self._artifacts = Artifacts(machine=setup.name)
        self._compiles = setup.training.compile == "on"
        self._pieces: Pieces | None = None
        self._offered = {}
        self._lifeline = Lifeline()
        self._unacknowledged = Unacknowledged()

    def _make_ranks(self) -> Ranks:
        from share_compute_actors.group.ranks.processes import RankDevices  # noqa: PLC0415 - slow to import
        from share_compute_actors.training.member.ranks import Ranks  # noqa: PLC0415 - slow to import

        setup = self._setup
        devices = RankDevices.of(setup.device, setup.lent_devices)
        ranks = Ranks(setup.ranks, setup.threads, setup.deadline_s, self._end, setup.operators, devices)
        self._engine.outdate = ranks.outdate
        return ranks

    def _notify(self, message: ToCoordinator | ShareComputeError, figures: StepFigures | None) -> None:
        coordinator, key = self._coordinator
        said = pack_said(message, figures)
        self._unacknowledged.add(coordinator.receive.remote(self._setup.worker, key, said), key, said)

    def _report_loss(self, lost: ShareComputeError) -> Any:
        coordinator, key = self._coordinator
        return coordinator.receive.remote(self._setup.worker, key, pack_said(lost, None))

    # -- shards ------------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="orders")
    @answers(COUNT)
    def load(
        self,
        shard_store: Any,
        shard: Shard,
        sources: Sources | None,
        applied: int,
        share: OptimizerShare = WHOLE,
    ) -> int:
        """Build a shard for the next epoch and fill it; return the size of its weights and buffers in bytes.

        The current shard stays until `adopt`, because other members may read it.

        Args:
            shard_store: the shard store, from which the member gets samples.
            shard: layers of the model.
            sources: actors that have the parameters, buffers and optimizer state: the shard store, or
                members. If None, weights are initialized from the seed.
            applied: last step whose update these weights include.
            share: the share of the optimizer's state that the member is to keep.

        Raises:
            ShareComputeError: as `build_runner` and `fill_runner` do.
        """
        return self._engine.order(partial(self._load, shard_store, shard, sources, applied, share))

    def _load(
        self, shard_store: Any, shard: Shard, sources: Sources | None, applied: int, share: OptimizerShare
    ) -> int:
        self._shard_store = shard_store
        runner, self._built = self._built, None
        if runner is None or (runner.stage.shard, runner.gradients.share) != (shard, share):
            # Frees the memory of a shard that was loaded for an epoch that never began.
            self._next = runner = None
            self._free_divided()
            runner = build_runner(self._setup, self._tree, shard, self._ranks, share)
        client = (
            None
            if sources is None
            else SourceClient(sources, self._setup.worker, self._own_state, self._traffic)
        )
        fill_runner(runner, self._setup, client)
        if self._compiles:
            self._compile(runner, applied)
        self._next, self._next_applied = runner, applied
        return sum(tensor.nbytes for tensor in runner.stage.persistent().values())

    @ray.method(concurrency_group="orders")
    @answers(STATUS)
    def build(self, shard: Shard) -> MemberStatus:
        """Build a shard for a later call of `load`, and return a heartbeat.

        A member that joins a running job gets this call first, because building a shard is slow.

        Raises:
            ContributorLost: this process sees no GPU, or a different GPU than the measured one.
            PlanInfeasible: the shard does not fit into this machine's memory.
            CompilerFailed: the job computes with compiled code, and this machine cannot compile.
        """
        if self._compiles:
            self._require_compiler()
        self._built = self._engine.order(partial(build_runner, self._setup, self._tree, shard, self._ranks))
        return self._status()

    @ray.method(concurrency_group="orders")
    @answers(NOTHING)
    def adopt(self, epoch: int, applied: int) -> None:
        """Switch to the loaded shard.

        Args:
            epoch: number of the epoch for which the member was halted; 0 before the first epoch.
            applied: last step whose update the weights include.
        """
        self._engine.order(partial(self._adopt, Loaded(epoch, applied)))

    def _adopt(self, loaded: Loaded) -> None:
        assert self._next is not None
        self._runner, self._next = self._next, None
        inputs, targets = (
            Rows(self._shard_store, part, self._report_shard_store_lost) for part in ("inputs", "targets")
        )
        samples = ShardSamples(
            self._runner.stage.shard,
            inputs,
            targets,
            reads_full_batch=self._setup.reads_full_batch,
            slices=self._setup.slices,
            parts=self._tree.microbatches // self._setup.slices,
        )
        self._engine.equip(self._runner, samples, loaded)
        self._free_divided()

    def _free_divided(self) -> None:
        """Free stages that are in use no more: those that ranks divide refer to themselves."""
        if self._ranks is not None:
            gc.collect()

    def _report_shard_store_lost(self, lost: ShardStoreLost) -> None:
        self._notify(lost, None)

    # -- epochs ------------------------------------------------------------------------------------------------------

    # `max_task_retries`: Ray repeats the call if a cut of the server's network breaks it.
    @ray.method(concurrency_group="pieces", max_task_retries=-1)
    @answers(NAMES)
    def unreached(self, places: Mapping[Worker, Place]) -> tuple[Worker, ...]:
        """Try to connect to the hosts of other members; return the members whose hosts do not answer."""
        unresponsive = unanswered(set(places.values()))
        return tuple(sorted(worker for worker, place in places.items() if place in unresponsive))

    @ray.method(concurrency_group="orders")
    @answers(NOTHING)
    def form(self, epoch: int, meeting: Rendezvous | None, rank: int, size: int) -> None:
        """Join the process group of the stage, if the stage has other members.

        Args:
            epoch: number of the epoch that is about to begin.
            meeting: data for forming the process group; None if the stage has no other members.
            rank: rank of this member in the stage.
            size: number of members of the stage.

        Raises:
            ContributorLost: not all members joined in time, or a halt for a later epoch ended the wait.
            StaleEpoch: a halt for a later epoch arrived, or a message from another member was lost.
        """
        self._engine.order(partial(self._form, epoch, meeting, rank, size))

    def _form(self, epoch: int, meeting: Rendezvous | None, rank: int, size: int) -> None:
        if epoch < self._machine.epoch:
            raise StaleEpoch(f"epoch {epoch} is over", hint="no action needed: the next epoch begins")
        self._next = None  # drops a shard that was loaded for an abandoned plan
        group = None
        if meeting is not None and size > 1:
            self._engine.forming = Forming(epoch, meeting.group)
            device = next(self._here().stage.module.parameters(), torch.empty(0)).device
            store = ChannelStore(self._open_channel(), self._setup.worker, meeting)
            group = join_group(meeting, rank, size, device, store)
            group.count_in(self._traffic)
        self._engine.join(group, rank, epoch)

    # -- between steps -----------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="orders")
    @answers(EVALUATION)
    def evaluate(
        self,
        split: Literal["validation", "test"],
        step: int,
        microbatches: Sequence[int],
        stage: int,
        stages: Sequence[Sequence[Worker]],
        most_outputs: int,
        task: int,
    ) -> dict[int, EvaluationResult]:
        """Evaluate this member's share of some microbatches; see `Passing.evaluate`.

        Raises:
            ShareComputeError: as `Passing.evaluate` does.
        """
        me = self._setup.worker
        return self._engine.order(
            lambda: self._passing().evaluate(me, split, step, microbatches, stage, stages, most_outputs, task)
        )

    @ray.method(concurrency_group="orders")
    @answers(LOGITS)
    def next_logits(
        self, step: int, ids: Sequence[int], stage: int, way: Sequence[Worker]
    ) -> NDArray[np.float32] | None:
        """Run a text through this stage; see `Passing.next_logits`.

        Return the logits of the next token, ``[vocabulary]``, if this is the last stage, otherwise None.

        Raises:
            ShareComputeError: as `Passing.next_logits` does.
        """
        return self._engine.order(lambda: self._passing().next_logits(step, ids, stage, way))

    def _passing(self) -> Passing:
        return Passing(
            self._here(), self._open_channel(), self._names, self._shard_store, self._setup.deadline_s
        )

    @ray.method(concurrency_group="orders")
    @answers(FINDING)
    def find_nonfinite(self, step: int, place: int, microbatches: Sequence[int]) -> NonFiniteValue | None:
        """Compute some microbatches of the open step again, and return where numbers stop being finite.

        Return None if no such place is found in this shard.

        Args:
            step: number of the open step.
            place: index of this member's stage.
            microbatches: ids of the microbatches. Microbatches whose input has not arrived are skipped.

        Raises:
            ShardStoreLost: the shard store, which has the samples, died.
        """
        return self._engine.order(partial(self._find_nonfinite, step, place, microbatches))

    def _find_nonfinite(self, step: int, place: int, microbatches: Sequence[int]) -> NonFiniteValue | None:
        runner, shard = self._here(), self._here().stage.shard
        inputs, targets = Rows(self._shard_store, "inputs"), Rows(self._shard_store, "targets")
        findings: list[NonFiniteValue | None] = []
        for microbatch in microbatches:
            entering, incoming = self._engine.arrived(step, microbatch)
            if shard.is_first:
                entering = inputs.take(step, microbatch)
            if shard.is_last:
                incoming = targets.take(step, microbatch)
            if entering is not None:
                findings.append(runner.find_nonfinite(step, place, microbatch, entering, incoming))
        return first_of(findings)

    @ray.method(concurrency_group="orders")
    @answers(FLAG)
    def snapshot(self, place: int, kind: FolderKind, *, copies: bool) -> bool:
        """Take a snapshot of this shard, which the shard store then fetches with `piece`.

        Args:
            place: index of the snapshot among all snapshots of the folder.
            kind: whether the folder is a checkpoint, an artifact or a contribution.
            copies: whether training is to continue during the fetch.

        Returns:
            True if the pieces come from a copy of the shard, so that training may continue. False if `copies`
            is false, or if there is too little memory for a copy.

        Raises:
            ShareComputeError: as `folder_tensors` does.
        """
        return self._engine.order(partial(self._snapshot, place, kind, copies=copies))

    def _snapshot(self, place: int, kind: FolderKind, *, copies: bool) -> bool:
        parts = folder_tensors(self._here(), self._setup.training.lora, kind)
        copy: dict[str, dict[str, Tensor]] | None = None
        if copies:
            with passing_through():
                # The payloads of a contribution are not part of the shard.
                copy = parts if kind == "contribution" else copied(parts, self._setup.lent_bytes)
        self._pieces = Pieces(parts if copy is None else copy, place)
        return copy is not None

    # -- calls that do not wait for the compute thread ---------------------------------------------------------------

    @ray.method(concurrency_group="control")
    @answers(NOTHING)
    def follow(self, coordinator: Any, shard_store: Any, key: bytes) -> None:
        """Switch to another attempt's coordinator and shard store.

        Drop the snapshot and the unacknowledged messages of the earlier attempt.

        Args:
            coordinator: the actor that gets later messages.
            shard_store: the actor from which later samples are requested.
            key: secret to send with later messages.
        """
        self._shard_store, self._pieces = shard_store, None
        self._engine.use_shard_store(shard_store)
        self._unacknowledged.clear()
        # Set last, so that the loss of the old shard store is not reported to the new coordinator.
        self._coordinator = coordinator, key

    @ray.method(concurrency_group="control")
    def receive(self, message: ToMember) -> None:
        """Queue a message from the coordinator."""
        self._engine.receive(message)

    @ray.method(concurrency_group="pieces")
    @answers(PIECE)
    def piece(self, number: int) -> Piece | None:
        """Return a piece of the snapshot, or None after the last one.

        Args:
            number: index of the piece, from 0. It must be the next index, or the previous one again.
        """
        assert self._pieces is not None
        piece = self._pieces.give(number)
        if piece is not None:
            self._traffic.send(piece.content.nbytes)
        return piece

    @ray.method(concurrency_group="pieces")
    @answers(NOTHING)
    def release_snapshot(self) -> None:
        """Drop the snapshot, which will no longer be fetched."""
        self._pieces = None

    @ray.method(concurrency_group="control")
    @answers(STATUS)
    def status(self) -> MemberStatus:
        """Return a heartbeat with this member's progress; each call restarts the time limit of `Lifeline`."""
        self._lifeline.pull()
        return self._status()

    def _status(self) -> MemberStatus:
        runner, waiting = self._runner, self._next
        step, reaches = self._engine.progress()
        resident = psutil.Process().memory_info().rss
        return MemberStatus(
            worker=self._setup.worker,
            step=step,
            resident_bytes=resident,
            peak_resident_bytes=peak_resident_bytes(),
            reaches=reaches,
            holds=None if runner is None else runner.part,
            loaded=None if waiting is None else waiting.part,
            loaded_step=self._next_applied,
            sent_bytes=self._traffic.sent_bytes,
            received_bytes=self._traffic.received_bytes,
            unacknowledged=self._unacknowledged.overdue(),
        )
