"""Sums tensors of the ranks of a member, through shared memory, or between devices with separate memory.

In shared memory, a rank writes its part, and sends one byte to each other rank. When a byte from each other rank has
arrived, it reads their parts. Calls alternate between two areas of the memory: after the bytes of a call have arrived,
all other ranks have read the area of the previous call.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, distributed

_NUMBERS = 1 << 20
"""Most float32 numbers that a rank writes at a time."""
_FLOAT_BYTES = 4
_HERE = b"."


def exchange_bytes(count: int) -> int:
    """Return the size of the shared memory of ``count`` ranks."""
    return 2 * count * _NUMBERS * _FLOAT_BYTES


class Exchange:
    """The ranks of a member, seen from one rank; see `RankGroup`.

    Args:
        rank: number of this rank.
        peers: sockets to the other ranks, one for each pair.
        memory: ``[exchange_bytes(count)]``, uint8, mapped by all ranks.
        deadline_s: longest wait for another rank, in seconds.
    """

    def __init__(self, rank: int, peers: Sequence[socket.socket], memory: Tensor, deadline_s: float) -> None:
        self.rank = rank
        self.count = len(peers) + 1
        self._areas = memory.view(torch.float32).view(2, self.count, _NUMBERS)
        self._area = 0
        self._cut: dict[tuple[int, int], list[Tensor]] = {}
        """Parts of all ranks, by area and by numbers in a part."""
        self._peers = peers
        for peer in peers:
            peer.settimeout(deadline_s)
        self._calls: list[tuple[Callable[[bytes], int], Callable[[int], bytes]]] = [
            (peer.send, peer.recv) for peer in peers
        ]

    def close(self) -> None:
        """Close the sockets to the other ranks."""
        for peer in self._peers:
            peer.close()

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks, computed in float32 in the order of the ranks.

        Raises:
            OSError: another rank ended, or was unresponsive for too long.
        """
        if part.numel() <= _NUMBERS:
            return _total(self._parts(part.reshape(-1))).view(part.shape).to(part.dtype)
        totals = [
            _total(self._parts(piece)) for piece in part.reshape(-1).split_with_sizes(_sizes(part.numel()))
        ]
        return torch.cat(totals).view(part.shape).to(part.dtype)

    def gather(self, part: Tensor) -> Tensor:
        """Return the tensors of all ranks, concatenated along the last dimension; on other ranks, return ``part``.

        Raises:
            OSError: as in `sum`.
        """
        found: list[list[Tensor]] = [[] for _ in range(self.count)]
        for piece in part.reshape(-1).split_with_sizes(_sizes(part.numel())):
            for own, rank_part in zip(found, self._parts(piece), strict=True):
                if self.rank == 0:
                    own.append(rank_part.clone())
        if self.rank:
            return part
        wholes = [torch.cat(pieces).view(part.shape) for pieces in found]
        return torch.cat(wholes, -1).to(part.dtype)

    def _parts(self, part: Tensor) -> list[Tensor]:
        """Give this rank's part to the others; return the parts of all ranks, valid until the call after the next."""
        key = self._area, part.numel()
        parts = self._cut.get(key)
        if parts is None:
            if len(self._cut) > 64:
                self._cut.clear()
            parts = self._cut[key] = list(self._areas[self._area, :, : part.numel()].unbind())
        self._area = 1 - self._area
        parts[self.rank].copy_(part)
        for send, _ in self._calls:
            send(_HERE)
        for _, receive in self._calls:
            if not receive(1):
                raise ConnectionError("another rank ended")
        return parts


class DeviceExchange:
    """The ranks of a member on devices with separate memory, in torch's default process group; see `RankGroup`.

    Args:
        rank: number of this rank.
        count: number of ranks.
    """

    def __init__(self, rank: int, count: int) -> None:
        self.rank = rank
        self.count = count

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks, computed in float32 in the order of the ranks.

        Parts are gathered and then added, because the library's own sum may add in an order that depends on the size.
        """
        return _total([each.float() for each in self._parts(part)]).to(part.dtype)

    def gather(self, part: Tensor) -> Tensor:
        """Return the tensors of all ranks, concatenated along the last dimension; on other ranks, return ``part``."""
        parts = self._parts(part)
        return part if self.rank else torch.cat(parts, -1)

    def _parts(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.count)]
        distributed.all_gather(parts, part.contiguous())
        return parts


def _sizes(numbers: int) -> list[int]:
    """Return the sizes of the pieces in which this many numbers are exchanged."""
    full, rest = divmod(numbers, _NUMBERS)
    return [_NUMBERS] * full + ([rest] if rest or not full else [])


def _total(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total
