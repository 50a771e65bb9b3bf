"""Ranks of a member divide the layers of its serving stage."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from share_compute.errors import ShareComputeError
from share_compute.files.strict import StrictModel
from share_compute.inference.runtime.tensor_parallel import RankGroup
from share_compute.inference.runtime.tensor_stage import LeadingStage, TensorStage
from share_compute.inference.scheduler.engine_steps import Chunk, EngineStep, Opening, SlotGrowth
from share_compute.inference.scheduler.options import SamplingOptions
from share_compute.models.devices import OPERATIONS
from share_compute.shards import Shard
from share_compute_actors.group.allocator import trim
from share_compute_actors.group.ranks.exchange import DeviceExchange, Exchange, exchange_bytes
from share_compute_actors.group.ranks.processes import (
    MOST_BYTES,
    ONE_CPU,
    READY,
    START_S,
    RankDevices,
    RankPlace,
    RankProcesses,
    follow_member,
    mapped,
    memory_file,
)

_HEAD = Struct("<BQQ")
"""Kind of a message, the size of its JSON content, and that of the numbers after it, in bytes."""
_STAGE, _SEAL, _STEP, _CLEAR, _DROP = range(5)
_DRAWS_NOTHING = SamplingOptions(temperature=0, seed=0, max_tokens=1)
_log = logging.getLogger(__name__)


class DividedShard(StrictModel):
    """A shard that ranks divide."""

    config: dict[str, Any]
    shard: Shard
    dtype: str
    quantizes: bool
    window_tokens: int


class ServingRanks(RankProcesses):
    """The other ranks of a member that serves, started at the first use.

    Args:
        count: as in `RankProcesses`.
        threads: as in `RankProcesses`.
        deadline_s: as in `RankProcesses`.
        on_lost: as in `RankProcesses`.
        devices: as in `RankProcesses`.
    """

    def __init__(
        self,
        count: int,
        threads: int,
        deadline_s: float,
        on_lost: Callable[[ShareComputeError], None] = lambda _: None,
        devices: RankDevices = ONE_CPU,
    ) -> None:
        super().__init__(__name__, count, threads, deadline_s, on_lost, devices)
        self._exchange: Exchange | DeviceExchange | None = None

    def divide(self, shard: DividedShard, **options: Any) -> LeadingStage:
        """Return the first rank's part of a shard; the other ranks get the other parts, which replace earlier ones.

        The caller fills the tensors of the part and seals it.

        Args:
            shard: the shard.
            options: arguments of `LeadingStage` that only the first rank needs.

        Raises:
            ContributorLost: a rank ended, or was unresponsive for too long.
            UserError: the ranks cannot divide the layers.
        """
        torch.set_num_threads(self.share)
        group = self._started()
        own = LeadingStage(
            shard.config,
            shard.shard,
            group,
            getattr(torch, shard.dtype),
            self,
            quantizes=shard.quantizes,
            window_tokens=shard.window_tokens,
            **options,
        )
        tensors = own.shared_tensors()
        memories = []
        with self.computing():
            self._say(_STAGE, shard.model_dump(mode="json"), is_answered=True)
            for size in tensors.sizes:
                with memory_file(size) as file:
                    memories.append(mapped(file.fileno(), size))
                    for connection in self.connections:
                        socket.send_fds(connection, [READY], [file.fileno()])
        tensors.place(memories)
        self.wait()
        _log.info("%d ranks divide layers %d to %d", self.count, shard.shard.start, shard.shard.stop - 1)
        return own

    def drop(self) -> None:
        """Make all other ranks free their parts."""
        if self.process_ids:
            with self.computing(on_device=False):
                self._say(_DROP)

    def wait(self, limit_s: float | None = START_S) -> None:
        """Wait until all other ranks have built or sealed their parts; see `RankProcesses.wait`."""
        super().wait(limit_s)

    # -- as `OtherRanks` ----------------------------------------------------------------------------------------------

    def seal(self, *, keeps_plain: bool) -> None:
        """Make all other ranks seal the stage, without waiting; call this in the context of `computing`."""
        self._say(_SEAL, keeps_plain, is_answered=True)

    def compute(self, step: EngineStep, inputs: Tensor) -> None:
        """Give all other ranks an engine step; call this in the context of `computing`."""
        numbers = inputs.cpu().contiguous().flatten()
        content = numbers.view(torch.uint8).numpy().tobytes() if inputs.numel() else b""
        self._say(_STEP, _packed(step), content)

    def clear(self) -> None:
        """Make all other ranks free all KV slots; call this in the context of `computing`."""
        self._say(_CLEAR)

    def _say(self, kind: int, header: Any = None, content: bytes = b"", *, is_answered: bool = False) -> None:
        text = json.dumps(header).encode()
        message = _HEAD.pack(kind, len(text), len(content)) + text + content
        self.tell(message, is_answered=is_answered)

    # -- processes ---------------------------------------------------------------------------------------------------

    def _started(self) -> Exchange | DeviceExchange:
        """Start the other ranks, if they are not started yet, and return all ranks."""
        if self._exchange is None or not self.process_ids:
            if self.devices.has_own_memory:
                self.meet()
                self._exchange = DeviceExchange(0, self.count)
            else:
                self._exchange = self._share_memory()
        return self._exchange

    def _share_memory(self) -> Exchange:
        """Start ranks that sum tensors through main memory."""
        size = exchange_bytes(self.count)
        with ExitStack() as closing, self.computing():
            ends: dict[tuple[int, int], socket.socket] = {}
            for high in range(self.count):
                for low in range(high):
                    ends[low, high], ends[high, low] = socket.socketpair()
            for (rank, _), end in ends.items():
                if rank:
                    closing.callback(end.close)
            memory = closing.enter_context(memory_file(size))
            for rank in range(1, self.count):
                files = [ends[rank, other].fileno() for other in range(self.count) if other != rank]
                files.append(memory.fileno())
                self.launch(rank, list(map(str, files)), files)
            own = [ends[0, other] for other in range(1, self.count)]
            exchange = Exchange(0, own, mapped(memory.fileno(), size), self.deadline_s)
            self.wait()
        return exchange

    def close(self) -> None:
        """End the other ranks."""
        super().close()
        exchange, self._exchange = self._exchange, None
        if isinstance(exchange, Exchange):
            exchange.close()


def _packed(step: EngineStep) -> list[Any]:
    """Return the part of a step that a rank which draws no tokens needs."""
    return [
        [[one.sequence, one.capacity_tokens, one.copy_from, one.copy_tokens] for one in step.opens],
        step.closes,
        [[one.sequence, one.start, one.count, one.samples] for one in step.chunks],
        [[one.sequence, one.capacity_tokens] for one in step.grows],
    ]


def _unpacked(message: list[Any]) -> EngineStep:
    opens, closes, chunks, grows = message
    return EngineStep(
        id=0,
        epoch=0,
        batch=0,
        opens=tuple(
            Opening(sequence, capacity, _DRAWS_NOTHING, (), 0, source, count)
            for sequence, capacity, source, count in opens
        ),
        closes=tuple(closes),
        chunks=tuple(
            Chunk(sequence, start, count, None, samples) for sequence, start, count, samples in chunks
        ),
        grows=tuple(SlotGrowth(*growth) for growth in grows),
    )


def _inputs(stage: TensorStage, content: memoryview) -> Tensor:
    if not content:
        return torch.empty(0, dtype=torch.int64)
    if stage.shard.is_first:
        return torch.frombuffer(content, dtype=torch.int64)
    return torch.frombuffer(content, dtype=stage.dtype).view(-1, stage.hidden_size)


def _built(place: RankPlace, group: RankGroup, told: DividedShard) -> TensorStage:
    stage = TensorStage(
        told.config,
        told.shard,
        group,
        getattr(torch, told.dtype),
        quantizes=told.quantizes,
        window_tokens=told.window_tokens,
        device=OPERATIONS[place.kind].device,
    )
    tensors, memories = stage.shared_tensors(), []
    for size in tensors.sizes:
        file = place.received_file()
        memories.append(mapped(file, size))
        os.close(file)
    tensors.place(memories)
    return stage


def _joined(place: RankPlace, meeting: Sequence[str]) -> RankGroup:
    """Return all ranks.

    Args:
        place: this rank.
        meeting: the folder in which ranks on devices with separate memory meet. Otherwise, descriptors of the
            sockets between ranks and of the memory for their exchange.
    """
    if len(meeting) == 1:
        place.meet(meeting[0])
        return DeviceExchange(place.rank, place.ranks)
    *ends, memory = map(int, meeting)
    peers = [socket.socket(fileno=end) for end in ends]
    group = Exchange(place.rank, peers, mapped(memory, exchange_bytes(place.ranks)), place.deadline_s)
    os.close(memory)
    return group


def _follow(place: RankPlace, *meeting: str) -> None:
    """Carry out the commands of the member until it ends.

    Args:
        place: this rank.
        meeting: as in `_joined`.
    """
    group = _joined(place, meeting)
    stage: TensorStage | None = None
    while True:
        kind, size, more = _HEAD.unpack(place.received(_HEAD.size))
        header = json.loads(bytes(place.received(min(size, MOST_BYTES))))
        content = place.received(more)
        if kind == _STAGE:
            stage = None
            stage = _built(place, group, DividedShard.model_validate(header))
            place.answer()
        elif kind == _DROP:
            stage = None
            trim()
        elif stage is not None:
            if kind == _STEP:
                stage.compute(_unpacked(header), _inputs(stage, content))
            elif kind == _CLEAR:
                stage.clear()
                trim()
            else:
                stage.seal(keeps_plain=header)
                trim()
                place.answer()


if __name__ == "__main__":
    follow_member(sys.argv[1:], _follow)
