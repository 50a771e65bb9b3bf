"""Shares of the optimizer's state: each member of a stage updates some of the parameters (ZeRO-1).

The scheme is that of Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", 2020, with whole parameters in place of ranges of numbers. An optimizer that updates parameters one by one then
computes the same bits, whichever member updates a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn


class OptimizerShare(NamedTuple):
    """One of the equal shares of a stage's optimizer state."""

    number: int = 0
    """Index of the share."""
    total: int = 1
    """Number of shares; 1 if each member of the stage keeps the whole state."""


WHOLE = OptimizerShare()


def owners(sizes: Mapping[str, int], count: int, first: Collection[str] = ()) -> dict[str, int]:
    """Return the index of the share to which each parameter belongs.

    The largest parameters are assigned first, each to the share that is smallest so far: Graham's rule "longest
    processing time first". The largest share exceeds the mean by less than the largest parameter.

    Args:
        sizes: size of each parameter, by stored name.
        count: number of shares.
        first: parameters that belong to share 0.
    """
    loads = [0] * count
    found = {}
    for name in sorted(sizes, key=lambda name: (name not in first, -sizes[name], name)):
        index = 0 if name in first else min(range(count), key=lambda each: (loads[each], each))
        loads[index] += sizes[name]
        found[name] = index
    return found


class WeightBuckets:
    """Copies a stage's trained weights into flat buckets, in which members exchange their updates.

    Args:
        parameters: the parameters of each bucket, ordered by share.
        owner: index of the share to which each parameter belongs.
        share: the share of this member.
        spare: function that returns a flat tensor for a bucket, whose memory is free between an update and the next
            gradient. It returns None if the buckets are not those of the gradients, or if no memory is free.
    """

    def __init__(
        self,
        parameters: Sequence[Sequence[nn.Parameter]],
        owner: Mapping[nn.Parameter, int],
        share: OptimizerShare,
        spare: Callable[[int], Tensor | None] = lambda _: None,
    ) -> None:
        self._spare = spare
        self._layout = parameters
        self._owner = owner
        self._share = share
        self.shares = [ranges(group, owner, share.total) for group in parameters]
        """Range of elements of each share, by bucket and index of the share."""

    def __len__(self) -> int:
        """Return the number of buckets."""
        return len(self._layout)

    def packed(self, bucket: int) -> Tensor:
        """Return a flat tensor for a bucket, with this member's share of the weights at its position."""
        group, flat = self._layout[bucket], self._spare(bucket)
        if flat is None:
            size = sum(parameter.numel() for parameter in group)
            flat = torch.empty(size, dtype=group[0].dtype, device=group[0].device)
        for parameter, view in self._views(bucket, flat):
            if self._owner[parameter] == self._share.number:
                view.copy_(parameter.data)
        return flat

    def unpack(self, bucket: int, flat: Tensor) -> None:
        """Copy the other members' shares from a flat bucket into the parameters.

        Autograd graphs that hold the parameters stay valid: receiving a bucket again does not change its values.
        """
        for parameter, view in self._views(bucket, flat):
            if self._owner[parameter] != self._share.number:
                parameter.data.copy_(view)  # `data` has its own version counter

    def _views(self, bucket: int, flat: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        group = self._layout[bucket]
        pieces = torch.split(flat, [parameter.numel() for parameter in group])
        return [(parameter, piece.view_as(parameter)) for parameter, piece in zip(group, pieces, strict=True)]


def ranges(group: Sequence[nn.Parameter], owner: Mapping[nn.Parameter, int], count: int) -> list[slice]:
    """Return the range of elements of each share in a flat bucket, whose parameters are ordered by share."""
    sizes = [0] * count
    for parameter in group:
        sizes[owner[parameter]] += parameter.numel()
    edges = [sum(sizes[:place]) for place in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]
