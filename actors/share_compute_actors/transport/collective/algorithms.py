"""Allreduce algorithms, built from sends and receives between pairs of members.

- ``sharded`` is a direct reduce-scatter and all-gather: each member receives its slice of all members' tensors,
  combines the slices, and sends the result to all other members. This takes two hops and as much traffic as a ring.
- ``tree`` reduces up and broadcasts down a binomial tree, with few messages of full size.
- ``ring`` is gloo's own algorithm. It is not in this module.

With ``sharded`` and ``tree`` the results of all members have the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from share_compute_actors.transport.traffic import Traffic

PIECE_BYTES = 4 * 2**20
"""Largest size in bytes of the pieces in which tensors are sent, chosen so that pieces fit into the CPU's cache."""
PIECES_UNDER_WAY = 4

Combine = Callable[[list[Tensor], Tensor], None]
"""A function that combines tensors, in the order of ranks, into its second argument. It may overwrite all inputs."""
Operator = Callable[..., Tensor]
"""A function of two tensors and ``out``, such as `torch.add`."""
Waiting = Callable[[], Any]


class GlooLinks:
    """Sends and receives tensors between the members of one gloo group.

    All members must begin their operations in the same order, so that each operation has the same tags at all members.

    Args:
        group: the ``torch.distributed.ProcessGroupGloo`` of these members.
        rank: rank of this member.
        size: number of members.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group = group
        self.rank = rank
        self.size = size
        self._next_tag = 1  # Ray's own send and recv use 0
        self._scratch: dict[torch.dtype, Tensor] = {}
        self.traffic: Traffic | None = None
        """Counts what is sent and received; None until it is set."""

    def leave(self) -> None:
        """Release the group; no operation may be in progress."""
        self._group = None

    @property
    def others(self) -> list[int]:
        """The other ranks, starting with the next rank, so that members do not all send to the same rank first."""
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    def tags(self, count: int) -> range:
        """Return ``count`` new tags for the messages of one operation."""
        if self._next_tag + count >= 2**31:
            self._next_tag = 1
        self._next_tag += count
        return range(self._next_tag - count, self._next_tag)

    def send(self, tensor: Tensor, to: int, tag: int) -> Waiting:
        """Begin to send ``tensor`` to a rank; the returned function waits until the tensor may be changed."""
        if self.traffic is not None:
            self.traffic.count(sent=tensor.nbytes)
        return self._group.send([tensor], to, tag).wait if tensor.numel() else _nothing

    def receive(self, tensor: Tensor, source: int, tag: int) -> Waiting:
        """Begin to receive ``tensor`` from a rank; the returned function waits until all data has arrived."""
        if self.traffic is not None:
            self.traffic.count(received=tensor.nbytes)
        return self._group.recv([tensor], source, tag).wait if tensor.numel() else _nothing

    def count_ring(self, size_bytes: int) -> None:
        """Count this member's traffic when a ring of all members reduces ``size_bytes`` bytes."""
        if self.traffic is not None:
            moved = 2 * (self.size - 1) * size_bytes // self.size
            self.traffic.count(sent=moved, received=moved)

    def scratch(self, like: Tensor, count: int) -> Tensor:
        """Return a buffer of ``count`` elements of the same dtype as ``like``.

        The buffer is reused by later operations, so only one operation at a time may use it.
        """
        kept = self._scratch.get(like.dtype)
        if kept is None or kept.numel() < count:
            kept = self._scratch[like.dtype] = like.new_empty(count)
        return kept[:count]


def _nothing() -> None:
    """Do nothing: empty tensors are not sent, so there is nothing to wait for."""


def fold(operator: Operator) -> Combine:
    """Return a function that combines tensors by ``operator``, one at a time and in the order of ranks."""

    def combine(values: list[Tensor], out: Tensor) -> None:
        if len(values) == 1:
            out.copy_(values[0])
            return
        first, *middle, last = values
        for value in middle:
            operator(first, value, out=first)
        operator(first, last, out=out)

    return combine


def start_turn(
    links: GlooLinks,
    given: Mapping[int, Sequence[Tensor]],
    holders: Sequence[int],
) -> tuple[Callable[[], None], dict[int, list[Tensor]]]:
    """Reserve tags for one turn of a ring, in which each place passes its tensors to the next place.

    Return a function that runs the turn, and the tensors that it fills: for each of this member's places, the tensors
    of the previous place.

    Args:
        links: links to the other members.
        given: tensors of each of this member's places. All places have equally many tensors, of equal shapes.
        holders: rank of the member at each place.
    """
    places, numbers = len(holders), range(len(next(iter(given.values()))))
    found = {
        place: [torch.empty_like(each, memory_format=torch.contiguous_format) for each in own]
        for place, own in given.items()
    }
    tags = links.tags(places * len(numbers))

    def run() -> None:
        waits = []
        for place, own in given.items():
            after, before = (place + 1) % places, (place - 1) % places
            for number in numbers:
                if holders[after] == links.rank:
                    found[after][number].copy_(own[number])
                else:
                    tag = tags[place * len(numbers) + number]
                    waits.append(links.send(own[number].contiguous(), holders[after], tag))
                if holders[before] != links.rank:
                    tag = tags[before * len(numbers) + number]
                    waits.append(links.receive(found[place][number], holders[before], tag))
        for wait in waits:
            wait()

    return run, found


def slices(length: int, size: int) -> list[slice]:
    """Return each rank's slice of ``length`` elements; the sizes differ by at most one."""
    edges = [length * rank // size for rank in range(size + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def start_sharded(
    links: GlooLinks, parts: Sequence[Tensor], counts: Sequence[int], combine: Combine, out: Tensor
) -> Callable[[], None]:
    """Reserve tags for a reduction by reduce-scatter and all-gather; return a function that runs both.

    Args:
        links: links to the other members.
        parts: this member's tensors, flat and of the same length as ``out``; they are overwritten.
        counts: number of parts that each rank has.
        combine: combines the parts of all ranks, each cut to this member's slice.
        out: flat tensor that receives the whole result, at every member. May be one of ``parts``.
    """
    length = max(1, PIECE_BYTES // out.element_size())
    pieces = [slice(start, start + length) for start in range(0, out.numel(), length)]
    tags = links.tags(2 * len(pieces))

    def run() -> None:
        if not pieces:
            return
        width = -(-min(length, out.numel()) // links.size)
        scratch = links.scratch(out, PIECES_UNDER_WAY * sum(counts) * width).view(PIECES_UNDER_WAY, -1, width)
        begun: deque[_Piece] = deque()
        gathering: list[Waiting] = []
        for number, piece in enumerate(pieces):
            if len(begun) == PIECES_UNDER_WAY:
                gathering += finish(begun.popleft())
            place = scratch[number % PIECES_UNDER_WAY]
            cut = [part[piece] for part in parts]
            shares = slices(out[piece].numel(), links.size)
            begun.append(
                _Piece(links, cut, counts, out[piece], shares, place, tags[2 * number : 2 * number + 2])
            )
        while begun:
            gathering += finish(begun.popleft())
        for wait in gathering:
            wait()

    def finish(piece: _Piece) -> list[Waiting]:
        piece.combine(combine)
        return piece.gather()

    return run


def start_reduce_scatter(
    links: GlooLinks,
    parts: Sequence[Tensor],
    counts: Sequence[int],
    shares: Sequence[slice],
    combine: Combine,
    out: Tensor,
) -> Callable[[], None]:
    """Reserve tags for a reduce-scatter with given shares; return a function that runs it.

    Args:
        links: links to the other members.
        parts: this member's tensors, flat and of the same length as ``out``; they are overwritten.
        counts: number of parts that each rank has.
        shares: range of elements whose result each rank gets; the ranges may differ in length.
        combine: combines the parts of all ranks, each cut to this member's share.
        out: flat tensor, whose own share receives the result. Its other elements are undefined afterwards. May be one
            of ``parts``.
    """
    rounds = _rounds(shares, out)
    tags = links.tags(len(rounds))

    def run() -> None:
        own = [cut[links.rank] for cut in rounds]
        width = max((cut.stop - cut.start for cut in own), default=0)
        scratch = links.scratch(out, PIECES_UNDER_WAY * sum(counts) * width).view(
            PIECES_UNDER_WAY, sum(counts), width
        )
        begun: deque[_Piece] = deque()
        for number, cut in enumerate(rounds):
            if len(begun) == PIECES_UNDER_WAY:
                begun.popleft().combine(combine)
            place = scratch[number % PIECES_UNDER_WAY]
            begun.append(_Piece(links, parts, counts, out, cut, place, tags[number : number + 1]))
        while begun:
            begun.popleft().combine(combine)

    return run


def start_allgather(links: GlooLinks, tensor: Tensor, shares: Sequence[slice]) -> Callable[[], None]:
    """Reserve tags for an all-gather with given shares; return a function that runs it.

    Args:
        links: links to the other members.
        tensor: flat tensor, with this member's share at its place; receives the shares of all others.
        shares: range of elements that each rank has; the ranges may differ in length.
    """
    rounds = _rounds(shares, tensor)
    tags = links.tags(len(rounds))

    def run() -> None:
        waits: list[Waiting] = []
        for cut, tag in zip(rounds, tags, strict=True):
            waits += [links.receive(tensor[cut[rank]], rank, tag) for rank in links.others]
            waits += [links.send(tensor[cut[links.rank]], rank, tag) for rank in links.others]
        for wait in waits:
            wait()

    return run


def _rounds(shares: Sequence[slice], like: Tensor) -> list[list[slice]]:
    """Cut all shares into the same number of pieces, each of at most `PIECE_BYTES` divided by the number of shares."""
    length = max(1, PIECE_BYTES // len(shares) // like.element_size())
    longest = max((share.stop - share.start for share in shares), default=0)
    return [
        [
            slice(min(share.start + begin, share.stop), min(share.start + begin + length, share.stop))
            for share in shares
        ]
        for begin in range(0, longest, length)
    ]


class _Piece:
    """One piece of the tensors in a reduce-scatter; the constructor begins to exchange its slices."""

    def __init__(
        self,
        links: GlooLinks,
        parts: Sequence[Tensor],
        counts: Sequence[int],
        out: Tensor,
        shares: Sequence[slice],
        scratch: Tensor,
        tags: range,
    ) -> None:
        self._links, self._out, self._tag = links, out, tags[-1]
        self._shares = shares
        own = self._shares[links.rank]
        first = [0, *accumulate(counts)]
        self._values = [place[: own.stop - own.start] for place in scratch[: first[-1]]]
        mine = range(first[links.rank], first[links.rank + 1])
        for place, part in zip(mine, parts, strict=True):
            self._values[place] = part[own]
        self._receiving = [
            links.receive(self._values[place], rank, tags[0])
            for rank in links.others
            for place in range(first[rank], first[rank + 1])
        ]
        self._sending = [
            links.send(part[self._shares[rank]], rank, tags[0]) for rank in links.others for part in parts
        ]

    def combine(self, combine: Combine) -> None:
        """Wait for all slices, and write the result of this member's slice."""
        for wait in self._receiving:
            wait()
        combine(self._values, self._out[self._shares[self._links.rank]])
        for wait in self._sending:  # later results overwrite the memory from which these slices are sent
            wait()

    def gather(self) -> list[Waiting]:
        """Begin to exchange the results; return functions that wait for the exchange."""
        own = self._out[self._shares[self._links.rank]]
        others = self._links.others
        receiving = [self._links.receive(self._out[self._shares[rank]], rank, self._tag) for rank in others]
        return receiving + [self._links.send(own, rank, self._tag) for rank in others]


def start_tree(links: GlooLinks, tensor: Tensor, operator: Operator) -> Callable[[], None]:
    """Reserve tags for a reduction up a binomial tree and a broadcast down it; return a function that runs both.

    The parent of a rank is the rank without its lowest set bit.

    Args:
        links: links to the other members.
        tensor: flat tensor, reduced in place.
        operator: function of two tensors and ``out``.
    """
    pieces = torch.split(tensor, max(1, PIECE_BYTES // tensor.element_size()))
    tags = links.tags(2 * len(pieces))
    distances = [1 << power for power in range((links.size - 1).bit_length())]
    parent = next((links.rank - step for step in distances if links.rank & step), None)
    children = [
        links.rank + step
        for step in distances
        if links.rank % (2 * step) == 0 and links.rank + step < links.size
    ]

    def run() -> None:
        scratch = links.scratch(tensor, pieces[0].numel())
        sending: list[Waiting] = []
        for piece, tag in zip(pieces, tags[::2], strict=True):
            for child in children:
                arrived = scratch[: piece.numel()]
                links.receive(arrived, child, tag)()
                operator(piece, arrived, out=piece)
            if parent is not None:
                sending.append(links.send(piece, parent, tag))
        for wait in sending:
            wait()
        sending.clear()
        for piece, tag in zip(pieces, tags[1::2], strict=True):
            if parent is not None:
                links.receive(piece, parent, tag)()
            sending += [links.send(piece, child, tag) for child in reversed(children)]
        for wait in sending:
            wait()

    return run


def packed(group: Any, parts: Sequence[Tensor], counts: Sequence[int], combine: Combine, out: Tensor) -> None:
    """Reduce as `start_sharded` does, but with NCCL's all-to-all and all-gather.

    The operations are enqueued on the current stream, and do not block the host.

    Args:
        group: the ``torch.distributed.ProcessGroupNCCL`` of the members.
        parts: see `start_sharded`; they are not overwritten.
        counts: see `start_sharded`.
        combine: see `start_sharded`.
        out: see `start_sharded`.
    """
    size = len(counts)
    width = -(-out.numel() // size)
    pad = (0, size * width - out.numel())
    cut = [functional.pad(part, pad).view(size, width) for part in parts]
    sent = torch.stack(cut, dim=1).flatten() if cut else out.new_empty(0)
    got = out.new_empty(sum(counts), width)
    group.alltoall_base(
        got.view(-1), sent, [width * count for count in counts], [width * len(parts)] * size
    ).wait()
    combined = out.new_empty(width)
    combine(list(got), combined)
    whole = out.new_empty(size * width)
    group._allgather_base(whole, combined).wait()  # noqa: SLF001 - torch has no public name for it
    out.copy_(whole[: out.numel()])
