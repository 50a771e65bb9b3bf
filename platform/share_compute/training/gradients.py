"""Gradients of a shard in flat buckets: one tensor to reduce, scale or measure instead of hundreds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

BUCKET_BYTES = 8 * 2**20
"""Small enough that most of a reduction hides behind the backward pass, large enough that latency does not count."""


class GradientBuckets:
    """Makes every ``parameter.grad`` a view into a flat bucket.

    Buckets follow the reverse order of the parameters, which is about the order in which a backward finishes them.

    Args:
        parameters: by stored name.
        bucket_bytes: size at which a bucket is full.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> None:
        self.buckets: list[Tensor] = []
        self._sizes: list[int] = []
        self._missing: list[int] = []
        self._on_full: Callable[[int], None] | None = None
        group: list[nn.Parameter] = []
        for parameter in reversed(list(parameters.values())):
            if group and sum(member.nbytes for member in group) + parameter.nbytes > bucket_bytes:
                self._close(group)
                group = []
            group.append(parameter)
        if group:
            self._close(group)

    def _close(self, group: list[nn.Parameter]) -> None:
        number = len(self.buckets)
        bucket = torch.zeros(
            sum(member.numel() for member in group), dtype=group[0].dtype, device=group[0].device
        )
        start = 0
        for parameter in group:
            parameter.grad = bucket[start : start + parameter.numel()].view_as(parameter)
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, number=number: self._arrived(number)
            )
            start += parameter.numel()
        self.buckets.append(bucket)
        self._sizes.append(len(group))
        self._missing.append(0)

    def zero(self) -> None:
        """Clear all gradients."""
        for bucket in self.buckets:
            bucket.zero_()

    def watch(self, on_full: Callable[[int], None] | None) -> None:
        """Call ``on_full(bucket)`` in the next backward, whenever a bucket has all its gradients; None stops that."""
        self._missing = list(self._sizes)
        self._on_full = on_full

    def _arrived(self, number: int) -> None:
        if self._on_full is None:
            return
        self._missing[number] -= 1
        if self._missing[number] == 0:
            self._on_full(number)

    def squared_norm(self, without: Tensor | None = None) -> float:
        """Return the sum of squares of all gradients, less those of ``without`` (a copy that is counted elsewhere)."""
        total = sum(float(bucket.dot(bucket)) for bucket in self.buckets)
        if without is not None:
            flat = without.reshape(-1)
            total -= float(flat.dot(flat))
        return max(total, 0.0)

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for bucket in self.buckets:
            bucket.mul_(factor)


def clip_factor(norm: float, limit: float) -> float:
    """Return by what to multiply gradients of global norm ``norm`` so that it is at most ``limit`` (as torch does)."""
    return min(1.0, limit / (norm + 1e-6)) if math.isfinite(norm) else 1.0
