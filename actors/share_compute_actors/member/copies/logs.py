"""Reduced gradients on their way to who keeps a copy of a shard, and there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from share_compute.models.boundary import Expected
from share_compute.training.gradients import GradientBuckets
from share_compute.training.loss_scale import LossScale
from share_compute_actors.member.copies.room import Room
from share_compute_actors.member.copies.tensor_file import TensorFile

HEAD = -1
"""Place of a log's head among its `letters`; a bucket's is its number."""
HEAD_SHAPE = Expected((5,), frozenset({torch.float64}), is_finite=False)
"""What `Head.pack` makes."""


class Head(NamedTuple):
    """What is told with the gradient of a step."""

    buckets: int
    """How many the gradient has."""
    loss_scale: LossScale
    """That the gradient carries."""
    scale_before: float | None
    """What the gradient of the step before was multiplied by; None where that is not known."""

    def pack(self) -> Tensor:
        """Write as a tensor, ``[5]``."""
        loss_scale = self.loss_scale
        before = float("nan") if self.scale_before is None else self.scale_before
        return torch.tensor(
            [self.buckets, loss_scale.factor, loss_scale.clean_steps, loss_scale.is_dynamic, before],
            dtype=torch.float64,
        )

    @classmethod
    def unpack(cls, tensor: Tensor) -> Head:
        """Read what `pack` wrote."""
        buckets, factor, clean_steps, is_dynamic, before = tensor.tolist()
        loss_scale = LossScale(factor, int(clean_steps), bool(is_dynamic))
        return cls(int(buckets), loss_scale, None if before != before else before)  # noqa: PLR0124 - only NaN differs from itself


def letters(
    gradients: GradientBuckets, loss_scale: LossScale, scale_before: float | None
) -> Iterator[tuple[int, Tensor]]:
    """Yield what a step's log is sent as, and the place of each: the head, then one bucket after the other."""
    yield HEAD, Head(len(gradients), loss_scale, scale_before).pack()
    for bucket in range(len(gradients)):
        yield bucket, gradients.result(bucket)


class Log:
    """The reduced gradient of one step, on disk.

    Args:
        room: for it.
    """

    def __init__(self, room: Room) -> None:
        self._file = TensorFile(room)
        self._head: Head | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all of it is there."""
        return self._head is not None and len(self._file.names) == self._head.buckets

    @property
    def head(self) -> Head:
        """What was told with it."""
        assert self._head is not None
        return self._head

    @property
    def nbytes(self) -> int:
        """What it takes of the disk."""
        return self._file.nbytes

    def take(self, place: int, tensor: Tensor) -> None:
        """Take in one of its `letters`; what is there already stays as it is.

        Raises:
            Unavailable: there is no room for it.
        """
        if place == HEAD:
            self._head = self._head or Head.unpack(tensor)
        elif str(place) not in self._file.names:
            self._file.put(str(place), tensor)

    def gradient(self, bucket: int, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a bucket."""
        return self._file.part(str(bucket), start, stop)

    def verify(self) -> None:
        """See that the disk has what was written.

        Raises:
            VerificationFailed: it has not.
        """
        self._file.verify()

    def close(self) -> None:
        """Forget it."""
        self._file.close()
