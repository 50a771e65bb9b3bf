"""Lets microbatch shares follow the speed that members show: a straggler gets less, within a few steps."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping

from share_compute.planning.cost import fill_shares
from share_compute.protocol.roster import Roster, Worker
from share_compute_actors.coordinator.rosters import Shares
from share_compute_actors.messages import StepFigures

_STEPS = 3
"""Steps whose median counts at first: one slow step is no straggler, and three are soon over."""
_MOST_STEPS = 48
"""After each change of shares twice as many count, up to these: machines that vary are not chased for ever."""
_LEAST_GAIN = 0.15
"""Share of the slowest pool's time that must be gained: what machines vary by from step to step is not chased."""
_EPOCH_S = 1.0
"""What a new epoch costs: links and groups are made anew."""


class Balancer:
    """Watches how long the members of each pool compute."""

    def __init__(self) -> None:
        self._roster: Roster | None = None
        self._steps = _STEPS
        self._cell_s: dict[Worker, deque[float]] = {}

    def reform(self, roster: Roster) -> None:
        """Begin to watch other members, or the same with other shares."""
        before, self._roster = self._roster, roster
        if before is not None and before.pools != roster.pools:
            self._steps = _STEPS
        steps = self._steps
        self._cell_s = defaultdict(lambda: deque(maxlen=steps))

    def observe(self, step: int, figures: Mapping[Worker, StepFigures], steps_left: int) -> Shares | None:
        """Take in what members said of a step; return the shares that are worth a new epoch, if there are some.

        Args:
            step: its number.
            figures: by member.
            steps_left: that would run with other shares.
        """
        roster = self._roster
        if roster is None or step == roster.step:
            return None  # the first step of an epoch may have been begun before it, and warms up
        shares = self._shares(roster)
        for pool, own in zip(roster.pools, shares, strict=True):
            for worker, share in zip(pool, own, strict=True):
                if worker in figures and share:
                    said = figures[worker]
                    self._cell_s[worker].append((said.seconds - said.waited_s) / share)
        now_s, better_s, found = 0.0, 0.0, {}
        for place, (pool, own) in enumerate(zip(roster.pools, shares, strict=True)):
            if not all(own):
                continue  # fewer microbatches than members: there is nothing to share
            seen = [self._cell_s[worker] for worker in pool]
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
    def _shares(roster: Roster) -> list[tuple[int, ...]]:
        return [
            tuple(owners.count(worker) for worker in pool)
            for pool, owners in zip(roster.pools, roster.owners, strict=True)
        ]


def _slowest_s(cell_s: list[float], shares: tuple[int, ...]) -> float:
    return max(each * share for each, share in zip(cell_s, shares, strict=True))
