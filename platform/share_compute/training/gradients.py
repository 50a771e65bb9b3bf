"""Gradients of a shard in flat buckets: one tensor to reduce, scale or measure instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from share_compute.planning.workload import GRADIENT_BUCKET_BYTES


class GradientBuckets:
    """Makes every ``parameter.grad`` a view into a flat bucket.

    Buckets follow the reverse order of the parameters, which is about the order in which a backward finishes them.

    Args:
        parameters: by stored name; frozen ones have no gradient.
        bucket_bytes: size at which a bucket is full.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], bucket_bytes: int = GRADIENT_BUCKET_BYTES
    ) -> None:
        self._parameters = [parameter for parameter in parameters.values() if parameter.requires_grad]
        self.buckets: list[Tensor] = []
        self._sizes: list[int] = []
        self._missing: list[int] = []
        self._next = 0
        self._on_full: Callable[[int], None] | None = None
        group: list[nn.Parameter] = []
        for parameter in reversed(self._parameters):
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

    def watch(self, on_full: Callable[[int], None]) -> None:
        """Call ``on_full(bucket)`` in the next backward, for one bucket after the other as they have all gradients.

        The order is fixed, since members that reduce in different orders would sum different buckets. `finish`
        calls it for the buckets that are left.
        """
        self._missing = list(self._sizes)
        self._next = 0
        self._on_full = on_full

    def _arrived(self, number: int) -> None:
        if self._on_full is None:
            return
        self._missing[number] -= 1
        while self._next < len(self.buckets) and self._missing[self._next] <= 0:
            self._on_full(self._next)
            self._next += 1

    def finish(self) -> None:
        """After the backward: call for the buckets that have a parameter which got no gradient; stop watching."""
        if self._on_full is not None:
            for number in range(self._next, len(self.buckets)):
                self._on_full(number)
        self._on_full = None

    def squared_norm(self, without: nn.Parameter | None = None) -> float:
        """Return the sum of squares of all gradients, without those of one parameter that is counted elsewhere."""
        if without is None:
            return sum(float(bucket.dot(bucket)) for bucket in self.buckets)
        gradients = [parameter.grad for parameter in self._parameters if parameter is not without]
        return sum(float(torch.sum(gradient.square())) for gradient in gradients if gradient is not None)

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for bucket in self.buckets:
            bucket.mul_(factor)


def clip_factor(norm: float, limit: float) -> float:
    """Return by what to multiply gradients of global norm ``norm`` so that it is at most ``limit``, as torch does."""
    return min(1.0, limit / (norm + 1e-6))
