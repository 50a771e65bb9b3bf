"""Plans the placement of a deployment: at once for the current members, or on a background thread for all machines."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Literal

from share_compute.errors import PlanInfeasible
from share_compute.inference.placement import Placement, place
from share_compute.models.profiles.profile import ModelProfile
from share_compute.protocol.membership import Worker
from share_compute.specification import ServeJob
from share_compute.topology import Topology

_NOTICEABLE = 0.9
"""Ratio of new to current `ServingPrediction.bounded_s` below which new stages are formed."""


class Planner:
    """Plans the placements of one deployment.

    Args:
        spec: the user's request.
        profile: profile of the model.
        window_tokens: longest sequence, in tokens.
        embeds: whether the model is an encoder.
    """

    def __init__(
        self, spec: ServeJob, profile: ModelProfile, window_tokens: int, *, embeds: bool = False
    ) -> None:
        self.spec = spec
        self.window_tokens = window_tokens
        self.embeds = embeds
        self._profile = profile
        self._executor = ThreadPoolExecutor(1, "plans")
        self._answer: Future[Placement] | None = None

    def close(self) -> None:
        """Stop planning."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    @property
    def channel(self) -> Literal["auto", "direct", "ray"]:
        """Transport of tensors between members."""
        return self.spec.parallelism.channel

    @property
    def is_busy(self) -> bool:
        """Whether `begin` was called and `answer` has not reported the result yet."""
        return self._answer is not None

    def at_once(self, topology: Topology, epoch: int) -> Placement:
        """Return the best placement on these machines.

        The placement has the requested number of stages or, if that is impossible, the largest smaller number. Without
        a requested number, `place` chooses one.

        Raises:
            PlanInfeasible: there is no placement with any of these numbers; see `place`.
        """
        num_stages = self.spec.parallelism.stages
        if num_stages is None:
            return self._place(topology, epoch, None)
        for stages in range(num_stages, 1, -1):
            with suppress(PlanInfeasible):
                return self._place(topology, epoch, stages)
        return self._place(topology, epoch, 1)

    def begin(self, topology: Topology, epoch: int, *, is_first: bool) -> None:
        """Start to plan for these machines in the background.

        Args:
            topology: the machines.
            epoch: number of the epoch that the placement would begin.
            is_first: whether the replica has not served yet. Its first placement must have the requested number of
                stages, if one is requested.
        """
        assert self._answer is None
        if is_first:
            self._answer = self._executor.submit(self._place, topology, epoch, self.spec.parallelism.stages)
        else:
            self._answer = self._executor.submit(self.at_once, topology, epoch)

    def answer(self) -> Placement | None:
        """Return and forget the placement that the background search found; None if no search has finished.

        Raises:
            PlanInfeasible: the machines cannot hold the model.
        """
        if self._answer is None or not self._answer.done():
            return None
        answer, self._answer = self._answer, None
        return answer.result()

    def is_better(self, wanted: Placement, now: Placement | None, usable: Collection[Worker]) -> bool:
        """Return whether another placement is worth the pause of a membership change.

        This is always the case if there is no current placement, or if it contains a machine that may no longer be
        used.

        Args:
            wanted: the other placement.
            now: the current placement; None if there is none.
            usable: machines that may be used from now on.
        """
        if now is None or not set(now.workers).issubset(usable):
            return True
        num_stages = self.spec.parallelism.stages
        if num_stages is not None and len(wanted.workers) != len(now.workers):
            return len(wanted.workers) > len(now.workers)
        if wanted.concurrent != now.concurrent:
            return wanted.concurrent > now.concurrent
        return wanted.prediction.bounded_s < _NOTICEABLE * now.prediction.bounded_s

    def _place(self, topology: Topology, epoch: int, stages: int | None) -> Placement:
        return place(
            self.spec,
            topology,
            self._profile,
            window_tokens=self.window_tokens,
            epoch=epoch,
            stages=stages,
            embeds=self.embeds,
        )
