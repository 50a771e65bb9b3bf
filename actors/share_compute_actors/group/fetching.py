"""Fetches tensors from the actors that hold them (their sources), some rows at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
import torch
from ray.exceptions import ObjectLostError, RayActorError
from torch import Tensor

from share_compute.errors import ContributorLost, OutOfMemory, PlanInfeasible, StaleEpoch, WrongTensor
from share_compute.models.numbers import is_finite as has_finite_numbers
from share_compute.models.storage.slots import parameter_of
from share_compute.models.storage.weights import CHUNK_BYTES, copy_into, row_ranges, rows_of
from share_compute.protocol.membership import Worker
from share_compute.shards import Shard
from share_compute_actors.group.allocator import is_out_of_memory
from share_compute_actors.group.answering import shard_store_lost
from share_compute_actors.messages import Extent, Source, Sources, pack_extents
from share_compute_actors.transport.pieces import Piece, whole
from share_compute_actors.transport.traffic import Traffic

_CALLS_AHEAD = 2
"""Number of calls in flight, so that one answer can be transferred while the previous one is copied."""
_CALL_BYTES = 3 * CHUNK_BYTES
"""Maximum size in bytes of the tensors that one call requests, unless a single row is larger. It is below
`launch.INLINE_LIMIT_BYTES`, so that Ray sends the answer inside the reply."""


class SourceClient:
    """Calls the actors from which a member loads tensors.

    Args:
        sources: the actors that have the tensors.
        me: the member that loads the tensors.
        own: object whose methods replace Ray calls to the member itself; None to call all sources through Ray.
        traffic: counter and limit of received bytes; None for neither.
    """

    def __init__(
        self,
        sources: Sources,
        me: Worker | None = None,
        own: object | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self._traffic = traffic
        self.sources = sources
        self._me = me
        self._own = own

    def begin(self, source: Source, method: str, *arguments: Any) -> Callable[[], Any]:
        """Call a method of a source, and return a function that waits for its answer."""
        if not self._is_own(source):
            return partial(_given, source.ask(method, *arguments), source)
        answer = getattr(self._own, method)(*source.with_shard(*arguments))
        return lambda: answer

    def begin_rows(
        self, source: Source, method: str, extents: Sequence[Extent], size_bytes: int
    ) -> Callable[[], Any]:
        """Request rows of ``size_bytes`` bytes as `begin` does, when the download rate allows it."""
        if self._traffic is not None and not self._is_own(source):
            self._traffic.receive(size_bytes)
        return self.begin(source, method, pack_extents(extents))

    def _is_own(self, source: Source) -> bool:
        return self._own is not None and source.worker == self._me

    def ask(self, source: Source, method: str, *arguments: Any) -> Any:
        """Call a method of a source, wait for the answer and return it.

        Raises:
            ShardStoreLost: the source was an actor on the server, and its answer was lost.
            StaleEpoch: the source was a member, and its answer was lost.
        """
        return self.begin(source, method, *arguments)()


def fill(
    tensors: Mapping[str, Tensor],
    client: SourceClient,
    method: str,
    dtype: torch.dtype = torch.float32,
    numbers: Collection[str] = (),
) -> None:
    """Load tensors from their sources.

    Args:
        tensors: tensors to fill, by stored name.
        client: calls the sources of the tensors.
        method: name of the sources' method that returns rows.
        dtype: dtype of the rows that the sources return.
        numbers: names of the tensors that must be finite if their source is a member.

    Raises:
        ContributorLost: data arrived damaged in every attempt.
        ShardStoreLost: a source was an actor on the server, and its answer was lost.
        StaleEpoch: a source was a member, and its answer was lost.
        UserError: the weights do not fit the model's configuration.
        WrongTensor: a source returned data that does not fit the request.
    """
    calls = list(_calls(tensors, client.sources, dtype.itemsize))
    pending = deque(
        client.begin_rows(source, method, extents, size) for source, extents, size in calls[:_CALLS_AHEAD]
    )
    for number, (source, extents, _) in enumerate(calls, start=_CALLS_AHEAD):
        pieces: list[Piece] = pending.popleft()()
        if number < len(calls):
            later, wanted, size = calls[number]
            pending.append(client.begin_rows(later, method, wanted, size))
        if len(pieces) != len(extents):
            raise wrong(source, f"it gave {len(pieces)} tensors in place of {len(extents)}")
        for extent, piece in zip(extents, pieces, strict=True):
            arrived = piece if piece.is_whole else _again(client, source, method, extent)
            if source.worker is not None:
                rows = rows_of(tensors[extent.name], extent.start, extent.stop)
                _require_fit(source, extent, arrived, rows, dtype, is_finite=extent.name in numbers)
            copy_into(tensors[extent.name], extent.start, extent.stop, arrived.content, dtype)


def _require_fit(
    source: Source, extent: Extent, piece: Piece, rows: Tensor, dtype: torch.dtype, *, is_finite: bool
) -> None:
    """Raise `WrongTensor` if rows have the wrong size, or are not finite although ``is_finite`` requires it."""
    size = rows.numel() * dtype.itemsize
    if piece.content.nbytes != size:
        raise wrong(source, f"{extent.name} has {piece.content.nbytes} bytes in place of {size}")
    if is_finite and size and not has_finite_numbers(torch.from_numpy(piece.content.copy()).view(dtype)):
        raise wrong(source, f"the numbers of {extent.name} are not finite")


def wrong(source: Source, what: str) -> WrongTensor:
    """Return the error for a source that sent wrong data; ``what`` describes the defect."""
    return WrongTensor.of(source.name, source.worker or "", what)


def _again(client: SourceClient, source: Source, method: str, extent: Extent) -> Piece:
    """Refetch one piece, up to `pieces.TRIES` times, until it arrives undamaged.

    Raises:
        ContributorLost: the piece arrived damaged at each attempt.
    """
    damaged = ContributorLost(
        f"{extent.name} arrived damaged from {source.name} in every attempt",
        machine=source.name,
        hint="look into memory and network of that machine, then resume the job",
    )

    def ask() -> Piece:
        pieces: list[Piece] = client.ask(source, method, pack_extents([extent]))
        return pieces[0]

    return whole(ask, damaged)


def _calls(
    tensors: Mapping[str, Tensor], sources: Sources, itemsize: int
) -> Iterator[tuple[Source, list[Extent], int]]:
    """Yield each call's source, the row ranges (extents) to request, and the number of their bytes.

    Small tensors share calls, to save overhead.
    """
    call: list[Extent] = []
    place, size = 0, 0
    for name, tensor in tensors.items():
        own = sources.place(parameter_of(name))
        for start, stop in row_ranges(tensor.shape, itemsize):
            more = rows_of(tensor, start, stop).numel() * itemsize
            if call and (own != place or size + more > _CALL_BYTES):
                yield sources.all[place], call, size
                call, size = [], 0
            call.append(Extent(name, start, stop))
            place, size = own, size + more
    if call:
        yield sources.all[place], call, size


def _given(answer: Any, source: Source) -> Any:
    """Wait for the answer of a source and return it; see `SourceClient.ask`."""
    try:
        return ray.get(answer)
    except (RayActorError, ObjectLostError) as failure:
        if source.worker is None:
            raise shard_store_lost() from failure
        raise StaleEpoch(
            "a member died while its part of the shard was loaded",
            hint="no action needed: the next epoch begins",
        ) from failure


@contextmanager
def fits(shard: Shard, machine: str) -> Iterator[None]:
    """Convert a lack of memory inside the context into an error that names the machine.

    Raises:
        PlanInfeasible: there was too little memory.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OutOfMemory) as failure:
        if not is_out_of_memory(failure):
            raise
        raise PlanInfeasible(
            f"the shard of {len(shard)} layers does not fit into {machine}",
            machine=machine,
            hint="lend more memory there, use more stages, or smaller microbatches",
        ) from failure
