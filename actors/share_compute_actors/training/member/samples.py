"""The samples that one member's cells consume: inputs at the first stage, targets at the last."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from share_compute.errors import UserError
from share_compute.models.numbers import is_finite
from share_compute.protocol.membership import Membership, Worker
from share_compute.shard import Shard
from share_compute_actors.training.member.rows import Rows


class ShardSamples:
    """Provides the samples that one shard needs.

    Args:
        shard: layers of this member.
        inputs: fetches the inputs of samples; used only at the first stage.
        targets: fetches their targets; used only at the last stage.
    """

    def __init__(self, shard: Shard, inputs: Rows, targets: Rows) -> None:
        self._inputs = inputs if shard.is_first else None
        self._targets = targets if shard.is_last else None

    def input(self, step: int, microbatch: int) -> Tensor | None:
        """Return the inputs of a microbatch; None unless this is the first stage.

        Raises:
            UserError: some numbers of the samples are not finite.
        """
        if self._inputs is None:
            return None
        samples = self._inputs.take(step, microbatch)
        if not is_finite(samples):
            raise UserError(
                f"samples of microbatch {microbatch} of step {step} have numbers that are not finite",
                step=step,
                hint="look at the data: replace or drop these samples",
            )
        return samples

    def target(self, step: int, microbatch: int) -> Tensor | None:
        """Return the targets of a microbatch; None unless this is the last stage."""
        return self._targets.take(step, microbatch) if self._targets is not None else None

    def expect(self, membership: Membership, worker: Worker, step: int) -> None:
        """Request the samples that a member needs in a step and in the next one."""
        stage = membership.stage_of(worker)
        for number in (step, step + 1):
            own = [
                microbatch
                for microbatch, task in enumerate(membership.tasks_of(number)[stage])
                if task.worker == worker and (task.forward or task.backward)
            ]
            for rows in self._all:
                rows.expect(number, own)

    def forget(self, step: int) -> None:
        """Drop the samples of this step and of the steps before."""
        for rows in self._all:
            rows.forget(step)

    def use(self, shard_store: Any) -> None:
        """Request samples from another shard store from now on; this also ends a wait for the previous one."""
        for rows in self._all:
            rows.use(shard_store)

    @property
    def _all(self) -> tuple[Rows, ...]:
        return tuple(rows for rows in (self._inputs, self._targets) if rows is not None)
