"""Sums of gradients whose runs are compressed; see `share_compute.compression.sums`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from share_compute.compression.sums import BucketCodec, add_runs
from share_compute.protocol.collectives import Route
from share_compute.protocol.tree import Node, SummationTree
from share_compute_actors.transport.collective.algorithms import GlooLinks, Waiting
from share_compute_actors.transport.collective.expression import expression


class _Part(NamedTuple):
    """A partial sum that a member holds."""

    rank: int
    place: int
    """Position among the member's parts."""
    node: Node


def start_compressed(
    links: GlooLinks,
    parts: Sequence[Tensor],
    held: Sequence[Sequence[Node]],
    tree: SummationTree,
    codec: BucketCodec,
    out: Tensor,
    spread: Sequence[Route],
) -> Callable[[], None]:
    """Reserve tags for a sum of compressed runs; return a function that computes it.

    If several members hold parts of a run, they send these parts uncompressed to the member with the first part. This
    member adds them, and sends the compressed sum of the run to all others.

    All members encode and forward the runs in the same order, so members cannot wait for each other in a circle.

    Args:
        links: links to the other members.
        parts: this member's flat buckets; they are overwritten.
        held: nodes of the parts of each member, by rank.
        tree: order of the sum; it keeps the sums of runs apart.
        codec: codec of the runs' sums.
        out: flat bucket for the sum; may be one of ``parts``.
        spread: for each rank, the route by which its compressed sums reach the others.

    Raises:
        ValueError: the nodes do not cover all microbatches exactly once.
    """
    runs = [_Run(links, run, held, tree, spread) for run in tree.sums_of_runs]

    def compute() -> None:
        waits: list[Waiting] = []
        for run in runs:
            waits += run.begin(parts, out)
        payloads = []
        for run in runs:
            payload, sending = run.payload(codec)
            payloads.append(payload)
            waits += sending
        for run in runs:
            waits += run.forward()
        # this also rounds received payloads, and runs before `out` overwrites a part that is sent
        for wait in waits:
            wait()
        add_runs(tree, payloads, codec, out)

    return compute


class _Run:
    """The sum of one run.

    Args:
        links: links to the other members.
        node: the sum.
        held: nodes of the parts of each member, by rank.
        tree: order of the sum.
        spread: for each rank, the route by which its compressed sums reach the others.
    """

    def __init__(
        self,
        links: GlooLinks,
        node: Node,
        held: Sequence[Sequence[Node]],
        tree: SummationTree,
        spread: Sequence[Route],
    ) -> None:
        self._links = links
        self._parts = _parts_of(node, held)
        if not self._parts:
            raise ValueError(f"no member holds microbatches {node.start} to {node.stop - 1}")
        self._add = expression(tree, [part.node for part in self._parts], node)
        self._adder = self._parts[0].rank
        """Rank of the member that adds the parts."""
        self._route = spread[self._adder]
        self._tags = links.tags(len(self._parts))
        self._values: list[Tensor] = []
        self._arriving: list[Waiting] = []

    def begin(self, parts: Sequence[Tensor], like: Tensor) -> list[Waiting]:
        """Begin to send or receive the parts; return functions that wait until the sent parts may be changed."""
        links, sending = self._links, []
        for part, tag in zip(self._parts, self._tags, strict=True):
            if self._adder == links.rank:
                is_own = part.rank == links.rank
                self._values.append(parts[part.place] if is_own else torch.empty_like(like))
                if not is_own:
                    self._arriving.append(links.receive(self._values[-1], part.rank, tag))
            elif part.rank == links.rank:
                sending.append(links.send(parts[part.place], self._adder, tag))
        return sending

    def payload(self, codec: BucketCodec) -> tuple[Tensor, list[Waiting]]:
        """Add the parts, and begin to send or receive the compressed sum.

        Return the sum, and functions that wait until it is sent.
        """
        links, tag = self._links, self._tags[0]  # the first part is never sent
        if self._adder != links.rank:
            self._payload = torch.empty(codec.num_bytes, dtype=torch.uint8)
            self._arriving = [links.receive(self._payload, self._route.down[links.rank], tag)]
            return self._payload, []
        for wait in self._arriving:
            wait()
        self._add(self._values, self._values[0])
        self._payload, self._arriving = codec.encode(self._values[0]), []
        return self._payload, self._send()

    def forward(self) -> list[Waiting]:
        """Begin to forward a received sum; return functions that wait until the sum has arrived and was sent."""
        if self._adder == self._links.rank or not self._receivers:
            return self._arriving
        for wait in self._arriving:
            wait()
        return self._send()

    def _send(self) -> list[Waiting]:
        return [self._links.send(self._payload, rank, self._tags[0]) for rank in self._receivers]

    @property
    def _receivers(self) -> list[int]:
        """Ranks to which this member sends the compressed sum."""
        me = self._links.rank
        return [rank for rank in self._links.others if rank != self._adder and self._route.down[rank] == me]


def _parts_of(run: Node, held: Sequence[Sequence[Node]]) -> list[_Part]:
    """Return the parts of a run, in order."""
    found = [
        _Part(rank, place, node)
        for rank, nodes in enumerate(held)
        for place, node in enumerate(nodes)
        if run.start <= node.start < run.stop
    ]
    return sorted(found, key=lambda part: part.node)
