"""A member's samples, fetched from the shard store by step and microbatch; the next step's are prefetched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeVar

import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import ObjectLostError, RayActorError
from torch import Tensor

from share_compute.errors import ShardStoreLost
from share_compute_actors.group.answering import shard_store_lost

Answer = TypeVar("Answer")
Part = Literal["inputs", "targets"]


class Rows:
    """Fetches one part of the samples: their inputs or their targets.

    Args:
        shard_store: the shard store's actor.
        part: the part of each sample.
        tell_lost: called when the shard store died; `take` then waits for another shard store. If None, `take` raises
            the error.
    """

    def __init__(
        self, shard_store: Any, part: Part, tell_lost: Callable[[ShardStoreLost], None] | None = None
    ) -> None:
        self._shard_store = shard_store
        self._part = part
        self._tell_lost = tell_lost
        self._changed = threading.Condition()
        self._asked: dict[tuple[int, int], tuple[Any, Any]] = {}
        """Shard store that was called, and the call, by (step, microbatch). A call may return several microbatches."""

    def use(self, shard_store: Any) -> None:
        """Request samples from another shard store from now on; may be called from any thread."""
        with self._changed:
            self._shard_store = shard_store
            self._changed.notify_all()

    def expect(self, step: int, microbatches: Collection[int]) -> None:
        """Request samples before they are needed, so that they are transferred during other work."""
        missing = [microbatch for microbatch in microbatches if (step, microbatch) not in self._asked]
        if missing:
            shard_store = self._shard_store
            call = shard_store.train_rows.remote(step, missing, self._part)
            self._asked.update({(step, microbatch): (shard_store, call) for microbatch in missing})

    def take(self, step: int, microbatch: int) -> Tensor:
        """Return the samples of one microbatch, ``[batch, ...]``.

        Raises:
            ShardStoreLost: the shard store died, and no `tell_lost` was given.
        """
        while True:
            self.expect(step, [microbatch])
            shard_store, call = self._asked[step, microbatch]
            try:
                rows: Mapping[int, NDArray[Any]] = ray.get(call)
            except (RayActorError, ObjectLostError) as failure:
                self._asked.clear()
                self._await_other(shard_store, failure)
            else:
                return torch.tensor(rows[microbatch])

    def _await_other(self, lost: Any, failure: RayActorError | ObjectLostError) -> None:
        if self._tell_lost is None:
            raise shard_store_lost() from failure
        with self._changed:
            # The check needs the lock, so that the loss is not reported after `use` set another shard store.
            if self._shard_store is lost:
                self._tell_lost(shard_store_lost())
            self._changed.wait_for(lambda: self._shard_store is not lost)

    def forget(self, step: int) -> None:
        """Drop the samples of this step and of the steps before."""
        self._asked = {key: call for key, call in self._asked.items() if key[0] > step}
