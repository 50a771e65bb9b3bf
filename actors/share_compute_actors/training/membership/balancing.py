"""Proposes microbatch shares based on measured speeds: after a few steps, slow members get fewer microbatches."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping

from share_compute.planning.cost.cost import fill_shares
from share_compute.protocol.membership import Membership, Worker
from share_compute_actors.messages import StepFigures
from share_compute_actors.training.membership.epochs import Shares

_STEPS = 3
"""Initial number of steps over which the median of compute times is taken. A median ignores a single slow step."""
_MOST_STEPS = 48
"""Maximum number of steps over which the median is taken. Each proposal doubles the number, so changes become rare."""
_LEAST_GAIN = 0.15
"""Minimum gain that justifies new shares, as a fraction of the slowest stage's time. A smaller gain may be noise."""
_EPOCH_S = 1.0
"""Cost of a new epoch, in seconds: links and process groups are set up again."""


class Balancer:
    """Measures the time per microbatch of each member, and proposes shares of microbatches that balance each stage."""

    def __init__(self) -> None:
        self._membership: Membership | None = None
        self._steps = _STEPS
        self._cell_s: dict[Worker, deque[float]] = {}

    def reform(self, membership: Membership) -> None:
        """Restart the measurement for a new epoch, whose members or shares of microbatches may have changed."""
        before, self._membership = self._membership, membership
        if before is not None and before.stages != membership.stages:
            self._steps = _STEPS
        steps = self._steps
        self._cell_s = defaultdict(lambda: deque(maxlen=steps))

    def observe(self, step: int, figures: Mapping[Worker, StepFigures], steps_left: int) -> Shares | None:
        """Record the figures of a step; return new shares for some stages, or None if they are not worth a new epoch.

        Args:
            step: number of the step.
            figures: reported figures, by member.
            steps_left: number of steps that would run with the new shares.
        """
        membership = self._membership
        if membership is None or step == membership.step or membership.slices > 1:
            return None  # the first step of an epoch includes warm-up, and may have begun in an earlier epoch
        shares = self._shares(membership)
        for stage, own in zip(membership.stages, shares, strict=True):
            for worker, share in zip(stage, own, strict=True):
                if worker in figures and share:
                    said = figures[worker]
                    self._cell_s[worker].append((said.seconds - said.waited_s) / share)
        now_s, better_s, found = 0.0, 0.0, {}
        for place, (stage, own) in enumerate(zip(membership.stages, shares, strict=True)):
            if not all(own):
                continue  # a member without microbatches has no measured time
            seen = [self._cell_s[worker] for worker in stage]
            if any(len(times) < self._steps for times in seen):
                return None
            cell_s = [statistics.median(times) for times in seen]
            others = fill_shares(cell_s, sum(own)) or fill_shares(cell_s, sum(own), least=1)
            if others is None:
                return None
            now_s = max(now_s, _slowest_s(cell_s, own))
            better_s = max(better_s, _slowest_s(cell_s, others))
            if others != own:
                found[place] = others
        is_worth_it = better_s < (1 - _LEAST_GAIN) * now_s and (now_s - better_s) * steps_left > _EPOCH_S
        if not is_worth_it:
            return None
        self._steps = min(2 * self._steps, _MOST_STEPS)
        return found

    @staticmethod
    def _shares(membership: Membership) -> list[tuple[int, ...]]:
        return [
            tuple(owners.count(worker) for worker in stage)
            for stage, owners in zip(membership.stages, membership.owners, strict=True)
        ]


def _slowest_s(cell_s: list[float], shares: tuple[int, ...]) -> float:
    return max(each * share for each, share in zip(cell_s, shares, strict=True))
