"""The samples that one member's cells take in: at the first pool what goes in, at the last what is to come out."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from share_compute.errors import UserError
from share_compute.planning.partitioning import Shard
from share_compute.protocol.roster import Roster, Worker
from share_compute.training.numbers import is_finite
from share_compute_actors.member.rows import Rows


class Samples:
    """What one shard needs of the job's samples.

    Args:
        shard: the shard.
        inputs: samples of the first pool.
        targets: those of the last.
    """

    def __init__(self, shard: Shard, inputs: Rows, targets: Rows) -> None:
        self._inputs = inputs if shard.is_first else None
        self._targets = targets if shard.is_last else None

    def input(self, step: int, microbatch: int) -> Tensor | None:
        """Return what a microbatch begins with; None but at the first pool.

        Raises:
            UserError: some of its numbers are not finite.
        """
        if self._inputs is None:
            return None
        samples = self._inputs.take(step, microbatch)
        if not is_finite(samples):
            raise UserError(
                f"samples of microbatch {microbatch} of step {step} have numbers that are not finite",
                step=step,
                mend="look at the data: replace or drop these samples",
            )
        return samples

    def target(self, step: int, microbatch: int) -> Tensor | None:
        """Return what a microbatch is to end with; None but at the last pool."""
        return self._targets.take(step, microbatch) if self._targets is not None else None

    def expect(self, roster: Roster, worker: Worker, step: int) -> None:
        """Ask for what a member needs in a step and in the next one."""
        pool = roster.pool_of(worker)
        for number in (step, step + 1):
            own = [
                microbatch
                for microbatch, task in enumerate(roster.tasks_of(number)[pool])
                if task.worker == worker and (task.forward or task.backward)
            ]
            for rows in self._all:
                rows.expect(number, own)

    def forget(self, step: int) -> None:
        """Forget what belongs to a step that is applied."""
        for rows in self._all:
            rows.forget(step)

    def use(self, library: Any) -> None:
        """Ask another library from now on; ends a wait for that."""
        for rows in self._all:
            rows.use(library)

    @property
    def _all(self) -> tuple[Rows, ...]:
        return tuple(rows for rows in (self._inputs, self._targets) if rows is not None)
