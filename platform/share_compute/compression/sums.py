"""Compression of the gradients that the members of a stage add up.

A run is a sequence of microbatches whose gradients are added one after the other (`share_compute.protocol.tree`). The
sum of each run is encoded, one parameter after the other, and each member adds the decoded sums of all runs. So the
result follows from the runs alone, and not from the members, stages or buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Final

import torch
from torch import Tensor

from share_compute.compression.codec import Codec
from share_compute.errors import UserError, VerificationFailed
from share_compute.protocol.tree import Node, SummationTree

_VALID: Final = 0
_REFUSED: Final = 1


@dataclass(frozen=True, slots=True)
class BucketCodec:
    """Encodes flat buckets of gradients.

    A payload is one byte that says whether it is valid, then the parameters' payloads.

    A gradient that the codec refuses, because a value is not finite, is decoded as NaN. A payload that no encoder wrote
    is decoded as NaN, too. The checks of the step then find that the gradient is not finite, as they do without
    compression.
    """

    codec: Codec
    """A codec without state."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the bucket's parameters, in their order in the bucket."""

    @property
    def num_bytes(self) -> int:
        """Size of a payload."""
        return 1 + sum(self.codec.num_bytes(shape) for shape in self.shapes)

    def encode(self, bucket: Tensor) -> Tensor:
        """Return the payload of a flat bucket, uint8 ``[num_bytes]`` on the CPU."""
        pieces = torch.split(bucket, [prod(shape) for shape in self.shapes])
        payload = torch.full((self.num_bytes,), _REFUSED, dtype=torch.uint8)
        try:
            parts = [
                self.codec.encode(piece.view(shape), {})[0]
                for piece, shape in zip(pieces, self.shapes, strict=True)
            ]
        except UserError:
            return payload
        payload[0] = _VALID
        torch.cat(parts, out=payload[1:])
        return payload

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the values that a payload holds to a flat bucket, float32 on the CPU.

        Raises:
            ValueError: the payload is not ``[num_bytes]``, uint8.
        """
        if payload.shape != (self.num_bytes,) or payload.dtype != torch.uint8:
            raise ValueError(f"{payload.dtype} {list(payload.shape)}, not {self.num_bytes} bytes")
        if int(payload[0]) != _VALID:
            out.fill_(torch.nan)
            return
        edges, first = [1], 0
        for shape in self.shapes:
            edges.append(edges[-1] + self.codec.num_bytes(shape))
        try:
            for shape, (start, stop) in zip(self.shapes, pairwise(edges), strict=True):
                self.codec.decode(payload[start:stop], shape, out[first : first + prod(shape)].view(shape))
                first += prod(shape)
        except VerificationFailed:
            out.fill_(torch.nan)


def add_runs(tree: SummationTree, payloads: Sequence[Tensor], codec: BucketCodec, out: Tensor) -> None:
    """Add the decoded sums of all runs in the order of the tree.

    Args:
        tree: the order of the sum.
        payloads: payload of each run, in order.
        codec: codec of the payloads.
        out: flat bucket for the sum.
    """
    by_run = dict(zip(tree.sums_of_runs, payloads, strict=True))

    def total(node: Node) -> Tensor:
        if node in by_run:
            bucket = torch.empty(out.numel())
            codec.decode(by_run[node], bucket)
            return bucket
        children = tree.children(node)
        assert children is not None
        left, right = map(total, children)
        return left.add_(right)

    out.copy_(total(tree.root))
