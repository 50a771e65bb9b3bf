"""Recursive bisection: halve the machines, cut the layers in proportion to the halves' speeds, and plan each half."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout, StageLayout


class _Half(NamedTuple):
    """Stages (first layer, members) of a range of layers, and their times."""

    stages: tuple[tuple[int, tuple[int, ...]], ...]
    busy_s: float
    """Seconds that the slowest stage takes in a step for its microbatches, gradient sums and update."""
    trip_s: float
    """Seconds in which one microbatch passes through all stages and the links between them, forward and back."""


def halve(cost: TrainingCost, rates: Mapping[int, float], order: Sequence[int]) -> Iterator[Layout]:
    """Yield layouts on growing numbers of machines: the fastest machines, arranged in the given order.

    The caller must check that the layouts fit.
    """
    by_rate = sorted(order, key=lambda machine: (-rates[machine], machine))
    counts = sorted({min(len(order), 2**power) for power in range(len(order).bit_length() + 1)})
    for count in range(1, len(order) + 1) if len(order) <= 16 else counts:
        fastest = set(by_rate[:count])
        row = tuple(machine for machine in order if machine in fastest)
        layout = _layout(cost, _plan(cost, rates, row))
        if layout is not None:
            yield layout


def _plan(cost: TrainingCost, rates: Mapping[int, float], row: Sequence[int]) -> _Half:
    speed = np.cumsum([0.0, *(rates[machine] for machine in row)])

    @cache
    def best(low: int, high: int, start: int, stop: int) -> _Half:
        members = tuple(row[low:high])
        choices = [one_stage((max(members, key=lambda one: (rates[one], -one)),), start, stop)]
        if 1 < len(members) <= cost.workload.microbatches and cost.may_share(members):
            choices.append(one_stage(members, start, stop))
        if len(members) > 1 and stop - start > 1:
            middle = int(np.searchsorted(speed[low : high + 1], (speed[low] + speed[high]) / 2)) + low
            for split in {min(max(middle + shift, low + 1), high - 1) for shift in (-1, 0)}:
                share = (speed[split] - speed[low]) / (speed[high] - speed[low])
                cut = min(max(start + round((stop - start) * share), start + 1), stop - 1)
                left, right = best(low, split, start, cut), best(split, high, cut, stop)
                hop = cost.network.transfer_s(row[split - 1], row[split], float(cost.link_bytes[cut]))
                choices.append(
                    _Half(
                        left.stages + right.stages,
                        max(left.busy_s, right.busy_s),
                        left.trip_s + right.trip_s + 2 * hop,
                    )
                )
        return min(choices, key=lambda half: (half.busy_s + half.trip_s, half.stages))

    def one_stage(members: tuple[int, ...], start: int, stop: int) -> _Half:
        shares = cost.shares(members, start, stop)
        stages = ((start, tuple(sorted(members))),)
        if shares is None:
            return _Half(stages, math.inf, math.inf)
        stage = StageLayout(start, stop, members, shares)
        # A stage that cannot fit has an infinite time, so any other choice is preferred.
        fits = all(
            cost.bytes_needed(start, stop, share, 0, len(members)) <= cost.memory_bytes[member]
            for member, share in zip(members, shares, strict=True)
        )
        # The time of backups is left out. Only layouts of several stages need backups, so counting it would favor a
        # single stage even if several stages are requested.
        return _Half(
            stages, cost.busy_s(stage) + cost.end_s(stage) if fits else math.inf, cost.first_s(stage)
        )

    return best(0, len(row), 0, cost.num_layers)


def _layout(cost: TrainingCost, half: _Half) -> Layout | None:
    stops = [start for start, _ in half.stages[1:]] + [cost.num_layers]
    built = []
    for (start, members), stop in zip(half.stages, stops, strict=True):
        shares = cost.shares(members, start, stop)
        if shares is None:
            return None
        built.append(StageLayout(start, stop, members, shares))
    return Layout(tuple(built))
