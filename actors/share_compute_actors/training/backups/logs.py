"""Encodes a step's reduced gradient as messages to a backup member, and stores the received messages on disk."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from share_compute.models.boundary import Expected
from share_compute.training.gradients import GradientBuckets
from share_compute.training.loss_scale import LossScale
from share_compute_actors.training.backups.copy_quota import CopyQuota
from share_compute_actors.training.backups.tensor_file import TensorFile

HEAD = -1
"""Index of the message that carries a `GradientLogHeader`. All other messages have the index of their bucket."""
HEAD_SHAPE = Expected((6,), frozenset({torch.float64}), is_finite=False)
"""Shape and dtype of the tensor that `GradientLogHeader.pack` returns."""


class GradientLogHeader(NamedTuple):
    """Metadata of the gradient of one step."""

    buckets: int
    """Number of buckets of the gradient."""
    loss_scale: LossScale
    """Loss scale of the step. The gradient is still multiplied by it."""
    scale_before: float | None
    """Update factor (see `update_factor`) with which the previous step was applied; None if unknown."""
    rate_before: float | None = None
    """Learning rate of the previous step, if it depends on validations."""

    def pack(self) -> Tensor:
        """Return the header as a tensor, ``[6]``."""
        loss_scale = self.loss_scale
        before = [math.nan if each is None else each for each in (self.scale_before, self.rate_before)]
        return torch.tensor(
            [self.buckets, loss_scale.factor, loss_scale.clean_steps, loss_scale.is_dynamic, *before],
            dtype=torch.float64,
        )

    @classmethod
    def unpack(cls, tensor: Tensor) -> GradientLogHeader:
        """Return the header that a tensor from `pack` contains."""
        buckets, factor, clean_steps, is_dynamic, *before = tensor.tolist()
        loss_scale = LossScale(factor, int(clean_steps), bool(is_dynamic))
        return cls(int(buckets), loss_scale, *(None if math.isnan(each) else each for each in before))


def gradient_messages(
    gradients: GradientBuckets,
    loss_scale: LossScale,
    scale_before: float | None,
    rate_before: float | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield the messages of a gradient, each with its index: the packed `GradientLogHeader`, then the buckets.

    With a share of the optimizer's state, each bucket has only the gradients of this share.
    """
    own = gradients.own
    yield HEAD, GradientLogHeader(len(own), loss_scale, scale_before, rate_before).pack()
    yield from enumerate(own)


class GradientLog:
    """The reduced gradient of one step, on disk.

    Args:
        quota: limits the space that all copies of this member take.
    """

    def __init__(self, quota: CopyQuota) -> None:
        self._file = TensorFile(quota)
        self._head: GradientLogHeader | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the header and all buckets have arrived."""
        return self._head is not None and len(self._file.names) == self._head.buckets

    @property
    def head(self) -> GradientLogHeader:
        """Header of the gradient. It must have arrived."""
        assert self._head is not None
        return self._head

    @property
    def nbytes(self) -> int:
        """Size on disk, in bytes."""
        return self._file.nbytes

    def take(self, place: int, tensor: Tensor) -> None:
        """Store one message of the gradient (see `gradient_messages`); a repeated message changes nothing.

        Raises:
            Unavailable: there is no space for the message, or it cannot be written.
        """
        if place == HEAD:
            self._head = self._head or GradientLogHeader.unpack(tensor)
        elif str(place) not in self._file.names:
            self._file.put(str(place), tensor)

    def gradient(self, bucket: int, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a bucket."""
        return self._file.part(str(bucket), start, stop)

    def verify(self) -> None:
        """Check that the data on the disk is the data that was written.

        Raises:
            VerificationFailed: some data differs or cannot be read.
        """
        self._file.verify()

    def close(self) -> None:
        """Delete the gradient."""
        self._file.close()
