"""A member: the actor that holds one shard on one contributor and computes its cells."""

from __future__ import annotations

import resource
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import psutil
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from share_compute.errors import ContributorLost, PlanInfeasible
from share_compute.models.blueprint import Stage, build_stage
from share_compute.models.weights import copy_into, files, row_ranges, stream_file
from share_compute.planning.profile import FLOAT_BYTES
from share_compute.training.optimizers import optimizer_tensors, parameter_of, restore_optimizer
from share_compute_actors.allocator import passing_through
from share_compute_actors.channel import Channel, Keys
from share_compute_actors.collective import EpochGroup, join_group
from share_compute_actors.messages import (
    EvaluationResult,
    Label,
    MemberId,
    MemberSetup,
    MemberStatus,
    Peer,
    Rendezvous,
    StepResult,
)
from share_compute_actors.runner import Runner

_HELLO_TIMEOUT_S = 5.0
_REQUESTS_AHEAD = 2
"""Pieces asked for at one time: the next one travels while this one is copied, and no more is in memory."""


@ray.remote(num_cpus=0, concurrency_groups={"compute": 1, "control": 2, "mail": 2})
class Member:
    """One machine's work on one shard, for one epoch of one job.

    Methods of the group ``compute`` run one after the other in the order of their calls, on one thread; those of
    ``control`` and ``mail`` always answer.
    """

    def __init__(self, setup: MemberSetup) -> None:
        self._setup = setup
        self._step = setup.first_step - 1
        self._channel: Channel | None = None
        self._stage: Stage | None = None
        self._runner: Runner | None = None
        self._group: EpochGroup | None = None
        self._names: dict[MemberId, str] = {}
        self._library: Any = None
        self._pieces: Iterator[tuple[str, NDArray[np.uint8]]] = iter(())
        self._ahead: dict[tuple[int, str], Any] = {}

    # -- setting up ----------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="compute")
    def listen(self, keys: Keys, admitted: Sequence[bytes]) -> Peer:
        """Open this member's end of the channel and return where it is."""
        setup = self._setup
        self._channel = Channel(setup.job, setup.epoch, setup.address, keys, admitted)
        return Peer(setup.me, setup.name, self._channel.endpoint, keys.public)

    @ray.method(concurrency_group="compute")
    def load(self, library: Any, has_weights: bool) -> int:
        """Build the shard and fill it, from the library's weights or from the seed; return its bytes.

        Raises:
            PlanInfeasible: the shard does not fit into this machine's memory.
            UserError: the weights do not belong to the configuration.
        """
        torch.set_num_threads(self._setup.threads)
        self._library = library
        with self._fits(), passing_through():
            stage = build_stage(self._setup.blueprint, self._setup.shard, torch.device(self._setup.device))
            if has_weights:
                self._fill(stage.persistent(), library.weight)
            else:
                stage.initialize(self._setup.training.seed)
        self._stage = stage
        return sum(tensor.nbytes for tensor in stage.persistent().values())

    def _fill(self, tensors: Mapping[str, Tensor], method: Any) -> None:
        """Fill tensors from the library, some rows at a time; the next ones travel while these are copied."""
        ranges = [
            (name, start, stop)
            for name, tensor in tensors.items()
            for start, stop in row_ranges(tensor.shape, FLOAT_BYTES)
        ]
        asked = deque(method.remote(*rows) for rows in ranges[:_REQUESTS_AHEAD])
        for place, (name, start, stop) in enumerate(ranges):
            content = ray.get(asked.popleft())
            if place + _REQUESTS_AHEAD < len(ranges):
                asked.append(method.remote(*ranges[place + _REQUESTS_AHEAD]))
            copy_into(tensors[name], start, stop, content)

    @contextmanager
    def _fits(self) -> Iterator[None]:
        """Say which machine it was whose memory did not suffice."""
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError, RuntimeError) as failure:
            if isinstance(failure, RuntimeError) and not _is_about_memory(failure):
                raise
            raise PlanInfeasible(
                f"the shard of {len(self._setup.shard)} layers does not fit into {self._setup.name}",
                machine=self._setup.name,
                mend="lend more memory there, use more pools, or smaller microbatches",
            ) from failure

    @ray.method(concurrency_group="compute")
    def connect(self, peers: Sequence[Peer]) -> list[MemberId]:
        """Link to all other members, and return those whose greeting did not arrive by the direct link."""
        channel = self._open_channel()
        me = self._setup.me
        others = [peer for peer in peers if peer.me != me]
        self._names = {peer.me: peer.name for peer in peers}
        for peer in others:
            channel.connect(peer)
            channel.send(peer.me, _hello(me), torch.zeros(1))
        silent: list[MemberId] = []
        for peer in others:
            try:
                channel.receive(_hello(peer.me), peer.name, 0.0 if silent else _HELLO_TIMEOUT_S)
            except ContributorLost:
                silent.append(peer.me)
        return silent

    @ray.method(concurrency_group="compute")
    def use_calls(self, members: Mapping[MemberId, Any]) -> None:
        """Send to these members by Ray calls, not directly."""
        for member, handle in members.items():
            self._open_channel().use_calls(member, handle.deliver.remote)

    @ray.method(concurrency_group="compute")
    def form(self, meeting: Rendezvous | None) -> None:
        """Join the group of the pool, if it has other members, and make ready for the first step."""
        assert self._stage is not None
        setup = self._setup
        size = setup.pool_sizes[setup.me.pool]
        if meeting is not None and size > 1:
            device = next(self._stage.module.parameters(), torch.empty(0)).device
            self._group = join_group(meeting, setup.me.member, size, device)
        with self._fits():
            self._runner = Runner(setup, self._stage, self._open_channel(), self._names, self._group)
        optimizer = self._runner.optimizer
        if optimizer is not None:
            self._restore(optimizer, self._runner.parameters)

    def _restore(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
    ) -> None:
        shapes: dict[str, tuple[int, ...]] = ray.get(self._library.optimizer_shapes.remote())
        mine = {name: shape for name, shape in shapes.items() if parameter_of(name) in parameters}
        state = {name: torch.empty(shape) for name, shape in mine.items()}
        with passing_through():
            self._fill(state, self._library.optimizer_tensor)
        restore_optimizer(optimizer, parameters, state)

    # -- training ------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="compute")
    def step(self, number: int) -> StepResult:
        """Run one optimizer step together with all other members."""
        assert self._runner is not None
        inputs = self._rows(number, "inputs") if self._setup.shard.is_first else {}
        targets = self._rows(number, "targets") if self._setup.shard.is_last else {}
        with self._fits():
            result = self._runner.step(number, inputs, targets)
        self._step = number
        return result

    def _rows(self, step: int, part: Literal["inputs", "targets"]) -> dict[int, Tensor]:
        """Return this step's samples, and ask for the next step's so that they travel meanwhile."""
        for number in (step, step + 1):
            if (number, part) not in self._ahead:
                rows = self._library.train_rows.remote(number, self._setup.microbatches, part)
                self._ahead[number, part] = rows
        return _tensors(ray.get(self._ahead.pop((step, part))))

    @ray.method(concurrency_group="compute")
    def evaluate(
        self, split: Literal["validation", "test"], step: int, microbatches: Sequence[int]
    ) -> EvaluationResult | None:
        """Evaluate this member's part of some microbatches; only the last pool has an answer."""
        assert self._runner is not None
        setup = self._setup
        size = setup.pool_sizes[setup.me.pool]
        own = [microbatch for microbatch in microbatches if microbatch % size == setup.me.member]
        rows = self._library.evaluation_rows
        inputs = _tensors(ray.get(rows.remote(split, own, "inputs"))) if setup.shard.is_first else {}
        targets = _tensors(ray.get(rows.remote(split, own, "targets"))) if setup.shard.is_last else {}
        return self._runner.evaluate(split, step, own, inputs, targets)

    @ray.method(concurrency_group="compute")
    def save(self, folder: str, with_optimizer: bool) -> None:
        """Let the library fetch this shard, piece by piece; the first member of a pool speaks for all."""
        assert self._stage is not None
        assert self._runner is not None
        borrowed = set(self._stage.tied.values()) if not self._setup.shard.is_first else set()
        parts = {
            "model": {name: value for name, value in self._stage.persistent().items() if name not in borrowed}
        }
        if with_optimizer and self._runner.optimizer is not None:
            own = {name: value for name, value in self._runner.parameters.items() if name not in borrowed}
            parts["optimizer"] = optimizer_tensors(self._runner.optimizer, own)
        self._pieces = self._cut(parts)
        with passing_through():
            # The library fetches: what an actor answers is freed at once, what it sends as arguments piles up.
            ray.get(self._library.fetch.remote(folder, ray.get_runtime_context().current_actor))

    def _cut(self, parts: Mapping[str, Mapping[str, Tensor]]) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        for stem, tensors in parts.items():
            for number, group in enumerate(files(tensors)):
                name = f"{stem}-{self._setup.me.pool:04}-{number:04}.part"
                for piece in stream_file(group):
                    yield name, np.frombuffer(piece, dtype=np.uint8)

    # -- always answering ----------------------------------------------------------------------------------------

    @ray.method(concurrency_group="mail")
    def deliver(self, envelope: bytes, content: NDArray[np.uint8]) -> None:
        """Take in a tensor that came by a Ray call."""
        self._open_channel().deliver(envelope, content)

    @ray.method(concurrency_group="control")
    def next_piece(self) -> tuple[str, NDArray[np.uint8]] | None:
        """Give the next piece of what `save` saves, with the name of its file; None after the last one."""
        return next(self._pieces, None)

    @ray.method(concurrency_group="control")
    def status(self) -> MemberStatus:
        """Say that this member is alive, and how far it is."""
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return MemberStatus(self._setup.me, self._step, psutil.Process().memory_info().rss, peak)

    def _open_channel(self) -> Channel:
        assert self._channel is not None
        return self._channel


def _is_about_memory(failure: RuntimeError) -> bool:
    """Whether torch's allocator for the CPU raised it; it has no class of its own."""
    return "DefaultCPUAllocator" in str(failure)


def _hello(sender: MemberId) -> Label:
    return Label("train", 0, "hello", sender.member, sender.pool)


def _tensors(rows: Mapping[int, NDArray[Any]]) -> dict[int, Tensor]:
    return {microbatch: torch.tensor(values) for microbatch, values in rows.items()}
