"""A member: the actor that holds one shard on one contributor and computes its cells."""

from __future__ import annotations

import resource
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
import psutil
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from share_compute.errors import ContributorLost, PlanInfeasible, ShareComputeError, StaleEpoch
from share_compute.models.blueprint import Stage, build_stage
from share_compute.models.weights import copy_into, files, row_ranges, stream_file
from share_compute.planning.partitioning import Shard
from share_compute.planning.profile import FLOAT_BYTES
from share_compute.protocol.member import MemberMachine
from share_compute.protocol.member_events import Loaded
from share_compute.protocol.messages import ToCoordinator, ToMember
from share_compute.protocol.roster import Worker
from share_compute.protocol.tree import SummationTree
from share_compute.training.finiteness import Finding, first_of
from share_compute.training.loss_scale import LossScale
from share_compute.training.optimizers import optimizer_tensors, parameter_of, restore_optimizer
from share_compute_actors.allocator import passing_through
from share_compute_actors.channel import Channel, Keys
from share_compute_actors.collective import join_group
from share_compute_actors.engine import Engine, Forming
from share_compute_actors.messages import (
    EvaluationResult,
    FolderKind,
    Label,
    MemberSetup,
    MemberStatus,
    Peer,
    Rendezvous,
    Sources,
    StepFigures,
)
from share_compute_actors.passing import Passing
from share_compute_actors.rows import Rows
from share_compute_actors.runner import Runner
from share_compute_actors.saving import folder_tensors
from share_compute_actors.testing import Injector

_HELLO_TIMEOUT_S = 5.0
_REQUESTS_AHEAD = 2
"""Pieces asked for at one time: the next one travels while this one is copied, and no more is in memory."""


@ray.remote(num_cpus=0, concurrency_groups={"orders": 1, "control": 2, "mail": 2, "pieces": 2})
class Member:
    """One machine's work for one job, over all its epochs.

    Methods of the group ``orders`` run on the compute thread, one after the other; the others always answer.
    """

    def __init__(self, setup: MemberSetup, coordinator: Any) -> None:
        self._setup = setup
        self._coordinator = coordinator
        self._machine = MemberMachine(setup.worker, setup.applied)
        self._tree = SummationTree(setup.runs)
        injector = Injector(setup.failures, setup.worker)
        self._engine = Engine(self._machine, self._tree, self._tell, injector)
        self._runner: Runner | None = None
        self._next: Runner | None = None
        """Loaded for the next epoch, while others still read what is here."""
        self._names: dict[Worker, str] = {}
        self._library: Any = None
        self._pieces: Iterator[tuple[str, NDArray[np.uint8]]] = iter(())

    def _tell(self, message: ToCoordinator | ShareComputeError, figures: StepFigures | None) -> None:
        self._coordinator.hear.remote(self._setup.worker, message, figures)

    # -- state -------------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="orders")
    def load(self, library: Any, shard: Shard, sources: Sources | None) -> int:
        """Build a shard for the next epoch and fill it; return the bytes of its weights.

        What is here stays until `adopt`, since others may want to read it.

        Args:
            library: gives samples.
            shard: layers of the model.
            sources: who has each parameter and buffer, by stored name: the library, or members of the epoch before.
                None starts from the seed.

        Raises:
            PlanInfeasible: the shard does not fit into this machine's memory.
            UserError: the weights do not belong to the configuration.
        """
        return self._engine.order(partial(self._load, library, shard, sources))

    def _load(self, library: Any, shard: Shard, sources: Sources | None) -> int:
        setup = self._setup
        torch.set_num_threads(setup.threads)
        self._library = library
        with self._fits(shard), passing_through():
            stage = build_stage(setup.blueprint, shard, torch.device(setup.device))
            if sources is None:
                stage.initialize(setup.training.seed)
            else:
                self._fill(self._stored(stage, sources), sources.of, "weight")
            runner = Runner(stage, setup.training, self._tree, setup.tied)
            if sources is not None:
                runner.loss_scale = ray.get(sources.handles[0].loss_scale.remote())
                if runner.optimizer is not None:
                    self._restore(runner, sources)
        self._next = runner
        return sum(tensor.nbytes for tensor in stage.persistent().values())

    def _stored(self, stage: Stage, sources: Sources) -> dict[str, Tensor]:
        """Return what is filled from others; what a folder of the plain model lacks starts from the seed."""
        tensors = stage.persistent()
        if not stage.added:
            return tensors
        stage.initialize_added(self._setup.training.seed)
        known = {name for handle in sources.handles for name in ray.get(handle.inventory.remote())}
        return {name: tensor for name, tensor in tensors.items() if name in known or name not in stage.added}

    def _restore(self, runner: Runner, sources: Sources) -> None:
        """Fill the optimizer from those who have its state."""
        assert runner.optimizer is not None
        shapes: dict[str, tuple[int, ...]] = {}
        for place, handle in enumerate(sources.handles):
            for name, shape in ray.get(handle.optimizer_shapes.remote()).items():
                parameter = parameter_of(name)
                if parameter in runner.parameters and sources.places.get(parameter, 0) == place:
                    shapes[name] = shape
        state = {name: torch.empty(shape) for name, shape in shapes.items()}
        self._fill(state, lambda name: sources.of(parameter_of(name)), "optimizer_tensor")
        restore_optimizer(runner.optimizer, runner.parameters, state)

    def _fill(self, tensors: Mapping[str, Tensor], source: Callable[[str], Any], method: str) -> None:
        """Fill tensors from others, some rows at a time; the next ones travel while these are copied."""
        ranges = [
            (name, start, stop)
            for name, tensor in tensors.items()
            for start, stop in row_ranges(tensor.shape, FLOAT_BYTES)
        ]

        def ask(name: str, start: int, stop: int | None) -> Any:
            return getattr(source(name), method).remote(name, start, stop)

        asked = deque(ask(*rows) for rows in ranges[:_REQUESTS_AHEAD])
        for place, (name, start, stop) in enumerate(ranges):
            content = ray.get(asked.popleft())
            if place + _REQUESTS_AHEAD < len(ranges):
                asked.append(ask(*ranges[place + _REQUESTS_AHEAD]))
            copy_into(tensors[name], start, stop, content)

    @contextmanager
    def _fits(self, shard: Shard) -> Iterator[None]:
        """Say which machine it was whose memory did not suffice."""
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError, RuntimeError) as failure:
            if isinstance(failure, RuntimeError) and not is_about_memory(failure):
                raise
            raise PlanInfeasible(
                f"the shard of {len(shard)} layers does not fit into {self._setup.name}",
                machine=self._setup.name,
                mend="lend more memory there, use more pools, or smaller microbatches",
            ) from failure

    @ray.method(concurrency_group="orders")
    def adopt(self, epoch: int, applied: int) -> None:
        """Work with what was loaded.

        Args:
            epoch: that is about to begin.
            applied: last step whose update the weights have.
        """
        self._engine.order(partial(self._adopt, Loaded(epoch, applied)))

    def _adopt(self, loaded: Loaded) -> None:
        assert self._next is not None
        self._runner, self._next = self._next, None
        rows = partial(Rows, self._library)
        self._engine.equip(self._runner, rows("inputs"), rows("targets"), loaded)

    @ray.method(concurrency_group="pieces")
    def inventory(self) -> list[str]:
        """Return the stored names of all parameters and buffers here."""
        return list(self._here().stage.persistent())

    @ray.method(concurrency_group="pieces")
    def loss_scale(self) -> LossScale:
        """Return where the loss scale stands before the next step; only while no step is computed."""
        return self._here().loss_scale

    @ray.method(concurrency_group="pieces")
    def weight(self, name: str, start: int, stop: int | None) -> NDArray[np.uint8]:
        """Return rows [start, stop) of a parameter or buffer, as float32 bytes; only while no step is computed."""
        return _rows_as_bytes(self._here().stage.persistent()[name], start, stop)

    @ray.method(concurrency_group="pieces")
    def optimizer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the optimizer's tensors, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._optimizer_tensors().items()}

    @ray.method(concurrency_group="pieces")
    def optimizer_tensor(self, name: str, start: int, stop: int | None) -> NDArray[np.uint8]:
        """Return rows [start, stop) of one tensor of the optimizer's state, as float32 bytes."""
        return _rows_as_bytes(self._optimizer_tensors()[name], start, stop)

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        runner = self._here()
        return {} if runner.optimizer is None else optimizer_tensors(runner.optimizer, runner.parameters)

    def _here(self) -> Runner:
        assert self._runner is not None
        return self._runner

    # -- epochs ------------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="orders")
    def listen(self, epoch: int, keys: Keys, admitted: Sequence[bytes]) -> Peer:
        """Open this member's end of the epoch's channel and return where it is."""
        return self._engine.order(partial(self._listen, epoch, keys, admitted))

    def _listen(self, epoch: int, keys: Keys, admitted: Sequence[bytes]) -> Peer:
        setup = self._setup
        channel = Channel(setup.job, epoch, setup.address, keys, admitted)
        self._engine.open(channel)
        return Peer(setup.worker, setup.name, channel.endpoint, keys.public)

    @ray.method(concurrency_group="orders")
    def connect(self, peers: Sequence[Peer]) -> list[Worker]:
        """Link to all other members, and return those whose greeting did not arrive by the direct link."""
        return self._engine.order(partial(self._connect, peers))

    def _connect(self, peers: Sequence[Peer]) -> list[Worker]:
        channel = self._open_channel()
        self._names = {peer.worker: peer.name for peer in peers}
        others = [peer for peer in peers if peer.worker != self._setup.worker]
        places = {peer.worker: place for place, peer in enumerate(peers)}
        for peer in others:
            channel.connect(peer)
            channel.send(peer.worker, _hello(places[self._setup.worker]), torch.zeros(1))
        silent: list[Worker] = []
        for peer in others:
            try:
                label = _hello(places[peer.worker])
                channel.receive(label, peer.name, 0.0 if silent else _HELLO_TIMEOUT_S)
            except ContributorLost:
                silent.append(peer.worker)
        return silent

    @ray.method(concurrency_group="orders")
    def use_calls(self, members: Mapping[Worker, Any]) -> None:
        """Send to these members by Ray calls, not directly."""
        for member, handle in members.items():
            self._engine.order(partial(self._open_channel().use_calls, member, handle.deliver.remote))

    @ray.method(concurrency_group="orders")
    def form(self, epoch: int, meeting: Rendezvous | None, rank: int, size: int) -> None:
        """Join the group of the pool, if it has other members.

        Raises:
            ContributorLost: not all came; a halt for a later epoch ends the wait.
        """
        self._engine.order(partial(self._form, epoch, meeting, rank, size))

    def _form(self, epoch: int, meeting: Rendezvous | None, rank: int, size: int) -> None:
        if epoch < self._machine.epoch:
            raise StaleEpoch(f"epoch {epoch} is over", mend="nothing: the next epoch begins")
        group = None
        if meeting is not None and size > 1:
            self._engine.forming = Forming(epoch, meeting.group)
            device = next(self._here().stage.module.parameters(), torch.empty(0)).device
            group = join_group(meeting, rank, size, device)
        self._engine.join(group, rank, epoch)

    # -- between steps -----------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="orders")
    def evaluate(
        self,
        split: Literal["validation", "test"],
        step: int,
        microbatches: Sequence[int],
        pool: int,
        pools: Sequence[Sequence[Worker]],
    ) -> EvaluationResult | None:
        """Evaluate this member's part of some microbatches; only the last pool has an answer.

        Raises:
            StaleEpoch: somebody was lost meanwhile.
        """
        me = self._setup.worker
        return self._engine.order(
            lambda: self._passing().evaluate(me, split, step, microbatches, pool, pools)
        )

    @ray.method(concurrency_group="orders")
    def next_logits(
        self, step: int, ids: Sequence[int], pool: int, way: Sequence[Worker]
    ) -> NDArray[np.float32] | None:
        """Return what the model expects to follow a text, ``[vocabulary]``; only the last pool has an answer.

        Raises:
            StaleEpoch: somebody was lost meanwhile.
        """
        return self._engine.order(lambda: self._passing().next_logits(step, ids, pool, way))

    def _passing(self) -> Passing:
        return Passing(self._here(), self._open_channel(), self._names, self._library, self._setup.deadline_s)

    @ray.method(concurrency_group="orders")
    def find_nonfinite(self, step: int, pool: int, microbatches: Sequence[int]) -> Finding | None:
        """Compute some microbatches of the open step again, and return where numbers stop being finite."""
        return self._engine.order(partial(self._find_nonfinite, step, pool, microbatches))

    def _find_nonfinite(self, step: int, pool: int, microbatches: Sequence[int]) -> Finding | None:
        runner, shard = self._here(), self._here().stage.shard
        inputs, targets = Rows(self._library, "inputs"), Rows(self._library, "targets")
        findings: list[Finding | None] = []
        for microbatch in microbatches:
            entering, incoming = self._engine.arrived(step, microbatch)
            if shard.is_first:
                entering = inputs.take(step, microbatch)
            if shard.is_last:
                incoming = targets.take(step, microbatch)
            if entering is not None and incoming is not None:
                findings.append(runner.find_nonfinite(step, pool, microbatch, entering, incoming))
        return first_of(findings)

    @ray.method(concurrency_group="orders")
    def save(self, folder: str, place: int, kind: FolderKind) -> None:
        """Let the library fetch this shard, piece by piece; the first member of a pool speaks for all."""
        self._pieces = _cut(folder_tensors(self._here(), self._setup.training.lora, kind), place)
        with passing_through():
            # The library fetches: what an actor answers is freed at once, what it sends as arguments piles up.
            ray.get(self._library.fetch.remote(folder, ray.get_runtime_context().current_actor))

    # -- always answering --------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    def hear(self, message: ToMember) -> None:
        """Take in what the coordinator says."""
        self._engine.hear(message)

    @ray.method(concurrency_group="mail")
    def deliver(self, envelope: bytes, content: NDArray[np.uint8]) -> None:
        """Take in a tensor that came by a Ray call."""
        self._open_channel().deliver(envelope, content)

    @ray.method(concurrency_group="pieces")
    def next_piece(self) -> tuple[str, NDArray[np.uint8]] | None:
        """Give the next piece of what `save` saves, with the name of its file; None after the last one."""
        return next(self._pieces, None)

    @ray.method(concurrency_group="control")
    def status(self) -> MemberStatus:
        """Say that this member is alive, and how far it is."""
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        resident = psutil.Process().memory_info().rss
        return MemberStatus(self._setup.worker, self._machine.applied, resident, peak)

    def _open_channel(self) -> Channel:
        assert self._engine.channel is not None
        return self._engine.channel


def is_about_memory(failure: RuntimeError) -> bool:
    """Whether torch's allocator for the CPU raised it; it has no class of its own."""
    return "DefaultCPUAllocator" in str(failure)


def _cut(parts: Mapping[str, Mapping[str, Tensor]], place: int) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    for stem, tensors in parts.items():
        for number, group in enumerate(files(tensors)):
            name = f"{stem}-{place:04}-{number:04}.part"
            for piece in stream_file(group):
                yield name, np.frombuffer(piece, dtype=np.uint8)


def _rows_as_bytes(tensor: Tensor, start: int, stop: int | None) -> NDArray[np.uint8]:
    rows = tensor.detach()[start:stop] if tensor.dim() else tensor.detach()
    content: NDArray[np.uint8] = rows.float().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return content


def _hello(place: int) -> Label:
    return Label("train", 0, "hello", place, 0)
