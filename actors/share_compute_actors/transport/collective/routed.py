"""Sums along routes: the algorithms ring, tree and hierarchical of `share_compute.protocol.collectives`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from share_compute.protocol.collectives import Part
from share_compute_actors.transport.collective.algorithms import PIECE_BYTES, GlooLinks, Waiting, slices

SHARE_BYTES = 512 * 2**10
"""Largest size in bytes of a share of a piece: small, so that the members of a long route work at the same time."""
_AHEAD = 2
"""Ticks between the beginning of a receive and the use of the data."""


def start_routed(
    links: GlooLinks, tensors: Sequence[Tensor], own: Sequence[Part], out: Tensor
) -> Callable[[], None]:
    """Reserve tags for a sum along routes; return a function that computes it.

    The work of a member is ordered by ticks. Work at one tick waits only for messages that other members send at
    earlier ticks, so members cannot wait for each other in a circle. Each piece begins one tick after the piece before
    it, so pieces follow each other along a route.

    Args:
        links: links to the other members.
        tensors: this member's partial sums, flat and of the same length as ``out``; they are overwritten.
        own: this member's part of each route. Each piece of the tensors is cut into one share for each route.
        out: flat tensor that receives the whole sum. May be one of ``tensors``.
    """
    count = len(own)
    length = max(1, min(PIECE_BYTES, SHARE_BYTES * count) // out.element_size())
    pieces = [slice(start, start + length) for start in range(0, out.numel(), length)]
    tags = links.tags(2 * len(pieces) * count)

    def run() -> None:
        up: dict[int, list[_Share]] = defaultdict(list)
        down: dict[int, list[_Share]] = defaultdict(list)
        buffers = _Buffers(out, -(-min(length, out.numel()) // count))
        for number, piece in enumerate(pieces):
            for route, (part, share) in enumerate(zip(own, slices(out[piece].numel(), count), strict=True)):
                place = slice(piece.start + share.start, piece.start + share.stop)
                cut = [tensor[place] for tensor in tensors]
                made = _Share(links, part, cut, out[place], buffers, tags[2 * (number * count + route)])
                up[number + part.up_tick].append(made)
                down[number + part.down_tick].append(made)
        for tick in range(-_AHEAD, max(down, default=-1) + 1):
            for share_ in up.get(tick + _AHEAD, ()):
                share_.expect()
            for share_ in up.get(tick, ()):
                share_.add()
            for share_ in down.get(tick + 1, ()):
                share_.expect_sum()
            for share_ in down.get(tick, ()):
                share_.distribute()
        for shares in down.values():
            for share_ in shares:
                share_.finish()

    return run


class _Buffers:
    """Buffers for received partial sums; later shares reuse them.

    Args:
        like: a tensor of the same dtype and device.
        width: length of the largest share.
    """

    def __init__(self, like: Tensor, width: int) -> None:
        self._like, self._width = like, width
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        """Return a buffer that is not in use."""
        return self._free.pop() if self._free else self._like.new_empty(self._width)

    def give_back(self, buffers: Sequence[Tensor]) -> None:
        """Take back buffers whose content is no longer needed."""
        self._free += buffers


class _Share:
    """One share of one piece of the tensors in `start_routed`."""

    def __init__(
        self, links: GlooLinks, part: Part, tensors: list[Tensor], out: Tensor, buffers: _Buffers, tag: int
    ) -> None:
        self._links, self._part, self._out = links, part, out
        self._values = tensors
        self._buffers, self._tag = buffers, tag
        self._taken: list[Tensor] = []
        self._arriving: list[Waiting] = []
        self._sending: list[Waiting] = []

    def expect(self) -> None:
        """Begin to receive the partial sums of other members."""
        for source, count in self._part.arriving:
            for _ in range(count):
                self._taken.append(self._buffers.take())
                self._values.append(self._taken[-1][: self._out.numel()])
                self._arriving.append(self._links.receive(self._values[-1], source, self._tag))

    def add(self) -> None:
        """Add the partial sums, and begin to send the remaining sums; the root writes the whole sum."""
        for wait in self._arriving:
            wait()
        additions, kept = self._part.merge
        if self._part.up is not None:
            for left, right in additions:
                self._values[left].add_(self._values[right])
            self._sending = [
                self._links.send(self._values[place], self._part.up, self._tag) for _, place in kept
            ]
            return
        if additions:
            *inner, (left, right) = additions
            for one, other in inner:
                self._values[one].add_(self._values[other])
            torch.add(self._values[left], self._values[right], out=self._out)
        else:
            self._out.copy_(self._values[0])
        self._buffers.give_back(self._taken)

    def expect_sum(self) -> None:
        """Wait until the partial sums are sent, because the sum may overwrite them; then begin to receive the sum."""
        if self._part.down is None:  # the root completes the sum itself, at a later tick
            return
        for wait in self._sending:
            wait()
        self._buffers.give_back(self._taken)
        self._arriving = [self._links.receive(self._out, self._part.down, self._tag + 1)]

    def distribute(self) -> None:
        """Wait for the sum, and begin to forward it."""
        if self._part.down is not None:
            for wait in self._arriving:
                wait()
        self._sending = [self._links.send(self._out, rank, self._tag + 1) for rank in self._part.receivers]

    def finish(self) -> None:
        """Wait until the sum is sent."""
        for wait in self._sending:
            wait()
