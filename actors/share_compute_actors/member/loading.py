"""Builds a shard and fills it from whoever has its weights."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
import torch
from ray.exceptions import ObjectLostError, RayActorError
from torch import Tensor

from share_compute.errors import ContributorLost, PlanInfeasible, StaleEpoch, WrongTensor
from share_compute.models.blueprint import Stage, build_stage
from share_compute.models.boundary import Boundaries
from share_compute.models.weights import CHUNK_BYTES, copy_into, row_ranges, rows_of
from share_compute.planning.partitioning import Shard
from share_compute.protocol.roster import Worker
from share_compute.protocol.tree import SummationTree
from share_compute.training.numbers import is_finite as has_finite_numbers
from share_compute.training.optimizers import parameter_of, restore_optimizer
from share_compute_actors.machine.device import measured_device
from share_compute_actors.member.allocator import is_out_of_memory, passing_through
from share_compute_actors.member.pieces import Piece, whole
from share_compute_actors.member.reading import GivesState
from share_compute_actors.member.rows import library_lost
from share_compute_actors.member.runner import Runner
from share_compute_actors.messages import Extent, MemberSetup, Source, Sources, pack_extents
from share_compute_actors.wire import NAMES, Undeclared, unpack_answer

_CALLS_AHEAD = 2
"""Asked at one time: what the next one brings travels while this one is copied, and no more is in memory."""
_CALL_BYTES = 3 * CHUNK_BYTES
"""With what is around them less than `INLINE_LIMIT_BYTES`: the answer comes with the call, and in one go."""


def build_runner(setup: MemberSetup, tree: SummationTree, shard: Shard) -> Runner:
    """Return what computes a shard, its weights not yet filled; on the thread that will compute.

    Args:
        setup: of the member.
        tree: the order in which gradients are added.
        shard: layers of the model.

    Raises:
        ContributorLost: this process sees another GPU than the one that was measured.
        PlanInfeasible: the shard does not fit into this machine's memory.
    """
    torch.set_num_threads(setup.threads)
    with fits(shard, setup.name):
        stage = build_stage(setup.blueprint, shard, measured_device(setup.device, setup.gpu))
        training = setup.training
        boundaries = Boundaries.of(
            stage,
            setup.blueprint,
            training.microbatch_size,
            training.sequence_length,
            gradients_are_finite=training.precision != "float16",
        )
        return Runner(stage, training, tree, setup.tied, boundaries)


class Givers:
    """Asks those who have what a member loads; the member itself without a call, where it is one of them.

    Args:
        sources: who they are.
        me: the member.
        own: what it answers itself.
    """

    def __init__(self, sources: Sources, me: Worker | None = None, own: GivesState | None = None) -> None:
        self.sources = sources
        self._me = me
        self._own = own

    def begin(self, source: Source, method: str, *arguments: Any) -> Callable[[], Any]:
        """Call a method of a source, and return what waits for its answer."""
        if self._own is None or source.worker != self._me:
            return partial(_given, source.ask(method, *arguments), source)
        answer = getattr(self._own, method)(*source.asked(*arguments))
        return lambda: answer

    def ask(self, source: Source, method: str, *arguments: Any) -> Any:
        """Return what a source answers.

        Raises:
            LibraryLost: it was the library, and died.
            StaleEpoch: it was a member, and died.
        """
        return self.begin(source, method, *arguments)()


def fill_runner(runner: Runner, setup: MemberSetup, givers: Givers | None) -> None:
    """Give a runner the weights and the optimizer's state that others have.

    Args:
        runner: newly built.
        setup: of the member.
        givers: those who have each parameter and buffer. None starts from the seed.

    Raises:
        ContributorLost: what a machine gives arrives damaged.
        PlanInfeasible: the shard does not fit into this machine's memory.
        StaleEpoch: who had some of it died.
        UserError: the weights do not belong to the configuration.
    """
    stage = runner.stage
    with fits(stage.shard, setup.name), passing_through():
        if givers is None:
            stage.initialize(setup.training.seed)
            return
        stored = _stored(stage, givers, setup.training.seed)
        fill(stored, givers, "weights", numbers=runner.parameters.keys())
        runner.loss_scale = givers.ask(givers.sources.all[0], "loss_scale")
        if runner.optimizer is not None:
            _restore(runner, givers)


def _stored(stage: Stage, givers: Givers, seed: int) -> dict[str, Tensor]:
    """Return what is filled from others; what a folder of the plain model lacks starts from the seed."""
    tensors = stage.persistent()
    if not stage.added:
        return tensors
    stage.initialize_added(seed)
    known = {name for source in givers.sources.all for name in _inventory(givers, source)}
    return {name: tensor for name, tensor in tensors.items() if name in known or name not in stage.added}


def _inventory(givers: Givers, source: Source) -> tuple[str, ...]:
    """Return the names of the tensors that a source has.

    Raises:
        WrongTensor: a member answered with something else.
    """
    answer = givers.ask(source, "inventory")
    try:
        return unpack_answer(NAMES, answer, source.name)
    except Undeclared as failure:
        if source.worker is None:
            raise
        raise _wrong(source, failure.message) from failure


def _restore(runner: Runner, givers: Givers) -> None:
    """Fill the optimizer from those who have its state."""
    assert runner.optimizer is not None
    shapes: dict[str, tuple[int, ...]] = {}
    for place, source in enumerate(givers.sources.all):
        for name, shape in givers.ask(source, "optimizer_shapes").items():
            parameter = parameter_of(name)
            if parameter not in runner.parameters or givers.sources.place(parameter) != place:
                continue
            if math.prod(shape) > runner.parameters[parameter].numel():
                raise _wrong(source, f"the optimizer's {name} has shape {list(shape)}")
            shapes[name] = shape
    state = {name: torch.empty(shape) for name, shape in shapes.items()}
    fill(state, givers, "optimizer_state", numbers=state.keys())
    restore_optimizer(runner.optimizer, runner.parameters, state)


def fill(
    tensors: Mapping[str, Tensor],
    givers: Givers,
    method: str,
    dtype: torch.dtype = torch.float32,
    numbers: Collection[str] = (),
) -> None:
    """Fill tensors from others, some rows or some small tensors at a time; the next ones travel while these are copied.

    Args:
        tensors: by stored name.
        givers: those who have each of them.
        method: by which they give rows of them.
        dtype: what they give.
        numbers: names of the tensors whose numbers must be finite, where another member gives them.

    Raises:
        ContributorLost: what a machine gives arrives damaged.
        StaleEpoch: who had some of it died.
        UserError: the weights do not belong to the configuration.
        WrongTensor: a member gave something else than was asked for.
    """
    calls = list(_calls(tensors, givers.sources, dtype.itemsize))
    asked = deque(
        givers.begin(source, method, pack_extents(extents)) for source, extents in calls[:_CALLS_AHEAD]
    )
    for number, (source, extents) in enumerate(calls, start=_CALLS_AHEAD):
        pieces: list[Piece] = asked.popleft()()
        if number < len(calls):
            later, wanted = calls[number]
            asked.append(givers.begin(later, method, pack_extents(wanted)))
        if len(pieces) != len(extents):
            raise _wrong(source, f"it gave {len(pieces)} tensors in place of {len(extents)}")
        for extent, piece in zip(extents, pieces, strict=True):
            arrived = piece if piece.is_whole else _again(givers, source, method, extent)
            if source.worker is not None:
                rows = rows_of(tensors[extent.name], extent.start, extent.stop)
                _require_fit(source, extent, arrived, rows, dtype, is_finite=extent.name in numbers)
            copy_into(tensors[extent.name], extent.start, extent.stop, arrived.content, dtype)


def _require_fit(
    source: Source, extent: Extent, piece: Piece, rows: Tensor, dtype: torch.dtype, *, is_finite: bool
) -> None:
    """See that a member gave what was asked for.

    Raises:
        WrongTensor: it did not.
    """
    size = rows.numel() * dtype.itemsize
    if piece.content.nbytes != size:
        raise _wrong(source, f"{extent.name} has {piece.content.nbytes} bytes in place of {size}")
    if is_finite and size and not has_finite_numbers(torch.from_numpy(piece.content.copy()).view(dtype)):
        raise _wrong(source, f"the numbers of {extent.name} are not finite")


def _wrong(source: Source, what: str) -> WrongTensor:
    return WrongTensor.of(source.name, source.worker or "", what)


def _again(givers: Givers, source: Source, method: str, extent: Extent) -> Piece:
    """Ask for one piece until it arrives whole.

    Raises:
        ContributorLost: it does not.
    """
    damaged = ContributorLost(
        f"{extent.name} arrived damaged from {source.name} whenever it was asked for",
        machine=source.name,
        mend="look into memory and network of that machine, then resume the job",
    )

    def ask() -> Piece:
        pieces: list[Piece] = givers.ask(source, method, pack_extents([extent]))
        return pieces[0]

    return whole(ask, damaged)


def _calls(
    tensors: Mapping[str, Tensor], sources: Sources, itemsize: int
) -> Iterator[tuple[Source, list[Extent]]]:
    """Yield what is asked of one source at one time: calls for each small tensor would take longer than all else."""
    call: list[Extent] = []
    place, size = 0, 0
    for name, tensor in tensors.items():
        own = sources.place(parameter_of(name))
        for start, stop in row_ranges(tensor.shape, itemsize):
            more = rows_of(tensor, start, stop).numel() * itemsize
            if call and (own != place or size + more > _CALL_BYTES):
                yield sources.all[place], call
                call, size = [], 0
            call.append(Extent(name, start, stop))
            place, size = own, size + more
    if call:
        yield sources.all[place], call


def _given(asked: Any, source: Source) -> Any:
    """Return what a source answers.

    Raises:
        LibraryLost: it was the library, and died.
        StaleEpoch: it was a member, and died.
    """
    try:
        return ray.get(asked)
    except (RayActorError, ObjectLostError) as failure:
        if source.worker is None:
            raise library_lost() from failure
        raise StaleEpoch(
            "who had a part of the shard died while it was loaded", mend="nothing: the next epoch begins"
        ) from failure


@contextmanager
def fits(shard: Shard, machine: str) -> Iterator[None]:
    """Say which machine it was whose memory did not suffice.

    Raises:
        PlanInfeasible: it was too little for what is done inside.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as failure:
        if not is_out_of_memory(failure):
            raise
        raise PlanInfeasible(
            f"the shard of {len(shard)} layers does not fit into {machine}",
            machine=machine,
            mend="lend more memory there, use more pools, or smaller microbatches",
        ) from failure
