"""Says where a deployment is served best: at once with who is there, or in a thread of its own with all machines."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Literal

from share_compute.errors import PlanInfeasible
from share_compute.planning.profile import ModelProfile
from share_compute.protocol.roster import Worker
from share_compute.serving.placement import Placement, place
from share_compute.specification import ServeJob
from share_compute.topology import Topology

_NOTICEABLE = 0.9
"""Other pools are worth a pause when what they take is at most so much of what those that are there take."""


class Planner:
    """Plans for one deployment.

    Args:
        spec: what was asked for.
        profile: what the model costs.
        window_tokens: longest sequence.
        embeds: whether the model is an encoder.
    """

    def __init__(
        self, spec: ServeJob, profile: ModelProfile, window_tokens: int, *, embeds: bool = False
    ) -> None:
        self.spec = spec
        self.window_tokens = window_tokens
        self.embeds = embeds
        self._profile = profile
        self._pool = ThreadPoolExecutor(1, "plans")
        self._answer: Future[Placement] | None = None

    def close(self) -> None:
        """Plan no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def channel(self) -> Literal["auto", "direct", "ray"]:
        """How tensors are to travel."""
        return self.spec.parallelism.channel

    @property
    def is_busy(self) -> bool:
        """Whether an answer is to come."""
        return self._answer is not None

    def at_once(self, topology: Topology, epoch: int) -> Placement:
        """Return what is best with these machines; in as many pools as asked, or nearly as many.

        Raises:
            PlanInfeasible: they cannot hold the model.
        """
        asked = self.spec.parallelism.pools
        if asked is None:
            return self._place(topology, epoch, None)
        for pools in range(asked, 1, -1):
            with suppress(PlanInfeasible):
                return self._place(topology, epoch, pools)
        return self._place(topology, epoch, 1)

    def begin(self, topology: Topology, epoch: int, *, is_first: bool) -> None:
        """Begin to work out what is best with these machines.

        Args:
            topology: the machines.
            epoch: that would begin.
            is_first: whether all pools that were asked for must be there.
        """
        assert self._answer is None
        if is_first:
            self._answer = self._pool.submit(self._place, topology, epoch, self.spec.parallelism.pools)
        else:
            self._answer = self._pool.submit(self.at_once, topology, epoch)

    def answer(self) -> Placement | None:
        """Return what `begin` was asked for, once; None while it is not known.

        Raises:
            PlanInfeasible: the machines cannot hold the model.
        """
        if self._answer is None or not self._answer.done():
            return None
        answer, self._answer = self._answer, None
        return answer.result()

    def is_better(self, wanted: Placement, now: Placement | None, usable: Collection[Worker]) -> bool:
        """Return whether other pools are worth the pause that it takes to form them.

        Args:
            wanted: the others.
            now: those that compute; None when none do.
            usable: machines that may be used from now on.
        """
        if now is None or not set(now.workers).issubset(usable):
            return True
        asked = self.spec.parallelism.pools
        if asked is not None and len(wanted.workers) != len(now.workers):
            return len(wanted.workers) > len(now.workers)
        if wanted.concurrent != now.concurrent:
            return wanted.concurrent > now.concurrent
        return wanted.prediction.bounded_s < _NOTICEABLE * now.prediction.bounded_s

    def _place(self, topology: Topology, epoch: int, pools: int | None) -> Placement:
        return place(
            self.spec,
            topology,
            self._profile,
            window_tokens=self.window_tokens,
            epoch=epoch,
            pools=pools,
            embeds=self.embeds,
        )
