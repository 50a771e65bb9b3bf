"""Computes cells of slices of sequences (``parallelism.sequence``), together with the other members of the stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal

from torch import Tensor

from share_compute.models.huggingface.slices import LocalRing, Outgoing, among_themselves
from share_compute.training.finiteness import NonFiniteValue
from share_compute_actors.training.member.runner import Runner
from share_compute_actors.transport.collective.backend import EpochGroup


class SliceRunner(Runner):
    """Runner of a stage that takes slices of sequences. `join_ring` must be called before the first cell.

    Microbatch ``slice * parts + part`` is a slice of part ``part`` of the batch.
    """

    def join_ring(self, holders: Sequence[int]) -> None:
        """Begin to compute slices with these members.

        Args:
            holders: rank of the member of each slice.
        """
        own = [index for index, rank in enumerate(holders) if rank == self._rank]
        group, self._slices = self._group, len(holders)
        exchange = among_themselves if group is None else partial(_turn, group, tuple(holders))
        self._ring = LocalRing(own, exchange)

    def forward_slices(self, step: int, entering: Mapping[int, Tensor]) -> None:
        """Run slices of one part of the batch forward; see `forward`.

        Args:
            step: number of the step, from 1.
            entering: input of each microbatch.

        Raises:
            ContributorLost: another member of the stage was lost.
        """
        own = {
            self._slice(microbatch): partial(self.forward, step, microbatch, tensor)
            for microbatch, tensor in entering.items()
        }
        self._ring.run(self._slices, own)

    def backward_slices(self, incoming: Mapping[int, Tensor]) -> None:
        """Run slices of one part of the batch backward; see `backward`.

        Args:
            incoming: targets of each microbatch at the last stage, otherwise the gradient of its output.

        Raises:
            ContributorLost: another member of the stage was lost.
        """
        points = {self._slice(microbatch): self.gradients.begin(microbatch) for microbatch in incoming}
        own = {
            self._slice(microbatch): partial(self._run_backward, microbatch, tensor, adds=True)
            for microbatch, tensor in incoming.items()
        }
        self._ring.run(self._slices, own, lambda index: points[index]())
        self.gradients.finish()

    def _slice(self, microbatch: int) -> int:
        return microbatch * self._slices // self._tree.microbatches

    def find_nonfinite(
        self, step: int, place: int, microbatch: int, entering: Tensor, incoming: Tensor | None
    ) -> NonFiniteValue | None:
        """Return None, because a slice cannot be recomputed without the other slices."""
        del step, place, microbatch, entering, incoming
        return None

    def _timed(self, way: Literal["forward", "backward"]) -> AbstractContextManager[None]:
        # Several slices of this member alternate inside their layers.
        return super()._timed(way) if self._ring.is_single else nullcontext()


def _turn(group: EpochGroup, holders: Sequence[int], given: Outgoing) -> dict[int, list[Tensor]]:
    return group.turn_ring(given, holders)
