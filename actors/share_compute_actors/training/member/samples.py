"""Fetches a member's samples from the shard store: inputs at the first stage, targets at the last one.

Samples are requested by step and microbatch; samples of the next step are prefetched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import ObjectLostError, RayActorError
from torch import Tensor

from share_compute.errors import ShardStoreLost, UserError
from share_compute.models.numbers import is_finite
from share_compute.protocol.membership import Membership, Worker
from share_compute.shards import Shard
from share_compute_actors.group.answering import shard_store_lost

Part = Literal["inputs", "targets"]


class Rows:
    """Fetches the inputs of samples, or their targets.

    Args:
        shard_store: the shard store's actor.
        part: "inputs" or "targets".
        report_lost: called with the error if the shard store died; `take` then waits for another shard store.
            If None, `take` raises the error.
    """

    def __init__(
        self, shard_store: Any, part: Part, report_lost: Callable[[ShardStoreLost], None] | None = None
    ) -> None:
        self._shard_store = shard_store
        self._part = part
        self._report_lost = report_lost
        self._changed = threading.Condition()
        self._calls: dict[tuple[int, int], tuple[Any, Any]] = {}
        """Shard store that was called, and its pending answer, by (step, microbatch).

        One answer may contain several microbatches."""

    def use(self, shard_store: Any) -> None:
        """Switch to another shard store; may be called from any thread."""
        with self._changed:
            self._shard_store = shard_store
            self._changed.notify_all()

    def expect(self, step: int, microbatches: Collection[int]) -> None:
        """Request the samples of all microbatches that have not been requested yet; do not wait for them."""
        missing = [microbatch for microbatch in microbatches if (step, microbatch) not in self._calls]
        if missing:
            shard_store = self._shard_store
            call = shard_store.train_rows.remote(step, missing, self._part)
            self._calls.update({(step, microbatch): (shard_store, call) for microbatch in missing})

    def take(self, step: int, microbatch: int) -> Tensor:
        """Return the inputs or the targets of one microbatch's samples, ``[samples, ...]``.

        Raises:
            ShardStoreLost: the shard store died, and `report_lost` is None.
        """
        while True:
            self.expect(step, [microbatch])
            shard_store, call = self._calls[step, microbatch]
            try:
                rows: Mapping[int, NDArray[Any]] = ray.get(call)
            except (RayActorError, ObjectLostError) as failure:
                self._calls.clear()
                self._await_other(shard_store, failure)
            else:
                return torch.tensor(rows[microbatch])

    def _await_other(self, lost: Any, failure: RayActorError | ObjectLostError) -> None:
        if self._report_lost is None:
            raise shard_store_lost() from failure
        with self._changed:
            # Without the lock, `use` could set another shard store between the check and the report.
            if self._shard_store is lost:
                self._report_lost(shard_store_lost())
            self._changed.wait_for(lambda: self._shard_store is not lost)

    def forget(self, step: int) -> None:
        """Drop the samples of this step and of the steps before."""
        self._calls = {key: call for key, call in self._calls.items() if key[0] > step}


class ShardSamples:
    """Provides the inputs of samples at the first stage, and their targets at the last stage.

    Args:
        shard: layers of this member.
        inputs: fetches the inputs of samples; used only at the first stage.
        targets: fetches the targets of samples; used only at the last stage.
        reads_full_batch: whether samples of all microbatches of a step are requested, also those of other members.
            After a loss, a remaining member then has the samples that it needs.
        slices: number of slices of each sequence; with several, a microbatch is one slice of a part of the batch.
        parts: number of parts of a batch.
    """

    def __init__(
        self,
        shard: Shard,
        inputs: Rows,
        targets: Rows,
        *,
        reads_full_batch: bool = False,
        slices: int = 1,
        parts: int = 0,
    ) -> None:
        self._reads_full_batch = reads_full_batch
        self._slices, self._parts = slices, parts
        self._inputs = inputs if shard.is_first else None
        self._targets = targets if shard.is_last else None

    def input(self, step: int, microbatch: int) -> Tensor | None:
        """Return the inputs of a microbatch; None unless this is the first stage.

        Raises:
            ShardStoreLost: as `Rows.take` does.
            UserError: some numbers of the samples are not finite.
        """
        if self._inputs is None:
            return None
        samples = self._slice(self._inputs.take(step, self._part_of(microbatch)), microbatch)
        if not is_finite(samples):
            raise UserError(
                f"samples of microbatch {microbatch} of step {step} have numbers that are not finite",
                step=step,
                hint="look at the data: replace or drop these samples",
            )
        return samples

    def target(self, step: int, microbatch: int) -> Tensor | None:
        """Return the targets of a microbatch; None unless this is the last stage.

        Raises:
            ShardStoreLost: as `Rows.take` does.
        """
        if self._targets is None:
            return None
        return self._slice(self._targets.take(step, self._part_of(microbatch)), microbatch)

    def _part_of(self, microbatch: int) -> int:
        return microbatch if self._slices == 1 else microbatch % self._parts

    def _slice(self, part: Tensor, microbatch: int) -> Tensor:
        return part if self._slices == 1 else part.chunk(self._slices, 1)[microbatch // self._parts]

    def expect(self, membership: Membership, worker: Worker, step: int) -> None:
        """Request the samples that a member reads in a step and in the next step; do not wait for them."""
        stage = membership.stage_of(worker)
        for number in (step, step + 1):
            own = [
                microbatch
                for microbatch, task in enumerate(membership.tasks_of(number)[stage])
                if self._reads_full_batch or (task.worker == worker and (task.forward or task.backward))
            ]
            parts = sorted({self._part_of(microbatch) for microbatch in own})
            for rows in self._all:
                rows.expect(number, parts)

    def forget(self, step: int) -> None:
        """Drop the samples of this step and of the steps before."""
        for rows in self._all:
            rows.forget(step)

    def use(self, shard_store: Any) -> None:
        """Switch to another shard store; a wait for samples of the previous shard store ends."""
        for rows in self._all:
            rows.use(shard_store)

    @property
    def _all(self) -> tuple[Rows, ...]:
        return tuple(rows for rows in (self._inputs, self._targets) if rows is not None)
