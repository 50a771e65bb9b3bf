"""Exhaustive search over all layouts; slow and simple, and without any code of the real search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations
from typing import NamedTuple

from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.cost.memory import after_a_loss


def best(
    cost: TrainingCost,
    *,
    order: Sequence[int] | None = None,
    stages: int | None = None,
    members_per_stage: int | None = None,
) -> tuple[float, Layout | None]:
    """Return the smallest step time of any feasible layout, bitwise equal to that of `TrainingCost.step_s`.

    Layouts grow from the last stage to the first, as in the formula. A suffix that takes at least as long as the best
    layout so far is not extended, because stages in front of it only add time.

    Args:
        cost: the objective.
        order: only stages of machines that are adjacent in it, one after the other; machines before, between and
            behind stages hold no layers. Default: all sets of machines in all orders.
        stages: only layouts with this many stages.
        members_per_stage: only stages with this many members.
    """
    walk = _Walk(cost, stages, members_per_stage)
    if order is None:
        walk.any_order(tuple(range(cost.num_machines)), _Suffix())
    else:
        walk.in_order(tuple(order), _Suffix())
    return walk.best_s, walk.layout


def can_hold_a_layer(cost: TrainingCost, machine: int) -> bool:
    """Return whether a machine can hold a layer at all; orders contain only such machines."""
    return (
        math.isfinite(cost.cell_s(machine, 0, cost.num_layers))
        and cost.least_bytes <= cost.memory_bytes[machine]
    )


class _Suffix(NamedTuple):
    """The last stages of a pipeline, in pipeline order."""

    stages: tuple[StageLayout, ...] = ()
    window: int = 0
    """Number of forwards that the first stage runs ahead of its backwards; see `windows` of the schedule."""
    trip_s: float = 0.0
    step_s: float = 0.0


class _Walk:
    """Enumerates all layouts; terms of the formula that layouts share are cached."""

    def __init__(self, cost: TrainingCost, stages: int | None, members_per_stage: int | None) -> None:
        self._cost, self._stages, self._members_per_stage = cost, stages, members_per_stage
        self.best_s = math.inf
        self.layout: Layout | None = None
        self._stage, self._fits = cache(self._make_stage), cache(self._fits_anew)
        self._first_s, self._own_s = (
            cache(cost.first_s),
            cache(lambda stage: cost.busy_s(stage) + cost.tail_s(stage)),
        )
        self._hop_s, self._carry_s = cache(cost.hop_s), cache(cost.carry_s)

    def any_order(self, free: tuple[int, ...], behind: _Suffix) -> None:
        """Put every set of free machines before a suffix, and recurse with the others."""
        for size in range(1, len(free) + 1):
            for members in combinations(free, size):
                rest = tuple(machine for machine in free if machine not in members)
                for grown in self._grown(members, behind):
                    self.any_order(rest, grown)

    def in_order(self, free: tuple[int, ...], behind: _Suffix) -> None:
        """Put every run of adjacent free machines before a suffix, and recurse with the machines before the run."""
        for end in range(len(free), 0, -1):
            for begin in range(end):
                for grown in self._grown(tuple(sorted(free[begin:end])), behind):
                    self.in_order(free[:begin], grown)

    def _grown(self, members: tuple[int, ...], behind: _Suffix) -> Iterator[_Suffix]:
        """Yield suffixes with one more stage that do not hold all layers yet; keep the best of the complete ones."""
        if self._members_per_stage not in (None, len(members)) or not self._cost.may_share(members):
            return
        stop = behind.stages[0].start if behind.stages else self._cost.num_layers
        for start in range(stop):
            stage = self._stage(members, start, stop)
            grown = None if stage is None else self._before(stage, behind)
            if grown is None or grown.step_s >= self.best_s:
                continue
            if start > 0:
                yield grown
            elif self._stages in (None, len(grown.stages)):
                self.best_s, self.layout = grown.step_s, Layout(grown.stages)

    def _make_stage(self, members: tuple[int, ...], start: int, stop: int) -> StageLayout | None:
        shares = self._cost.shares(members, start, stop)
        return None if shares is None else StageLayout(start, stop, members, shares)

    def _before(self, stage: StageLayout, behind: _Suffix) -> _Suffix | None:
        """Compute one iteration of the loop of `TrainingCost.step_s`; return None if memory is short."""
        enter, carry, window = self._first_s(stage), 0.0, 0
        if behind.stages:
            after = behind.stages[0]
            window = behind.window + max(len(stage.members), len(after.members))
            enter += 2 * self._hop_s(stage, after)
            carry = self._carry_s(stage, after)
        if not self._fits(stage, window):
            return None
        trip = behind.trip_s + enter
        waits = max(carry, (self._cost.workload.microbatches - 1) // (window + len(stage.members)) * trip)
        step = max(enter + behind.step_s, self._own_s(stage), trip + waits)
        return _Suffix((stage, *behind.stages), window, trip, step)

    def _fits_anew(self, stage: StageLayout, window: int) -> bool:
        return all(
            self._cost.bytes_needed(stage.start, stage.stop, share, window)
            <= self._cost.memory_bytes[machine]
            for machine, share in zip(stage.members, after_a_loss(stage.shares), strict=True)
        )
