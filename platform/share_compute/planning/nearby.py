"""Neighbours of a layout for local search: a cut moved by a layer, a machine left out, two stages exchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from share_compute.planning.cost import TrainingCost
from share_compute.planning.layout import Layout, PoolLayout
from share_compute.planning.problem import Problem

_MOST_EXCHANGED = 12
"""Maximum number of stages for which any two are exchanged; with more stages, only neighbours are."""

Pools = tuple[tuple[int, tuple[int, ...]], ...]
"""(number of layers, members) of each stage."""


def nearby(problem: Problem, layout: Layout) -> Iterator[Layout]:
    """Yield layouts that differ little from ``layout`` and have the requested number of stages and members."""
    pools = tuple((pool.stop - pool.start, pool.members) for pool in layout.pools)
    for changed in _changed(problem, pools):
        shared = _shared(problem.cost, changed)
        if shared is not None:
            yield shared


def _changed(problem: Problem, pools: Pools) -> Iterator[Pools]:
    yield from _cuts(pools)
    yield from _exchanged(pools)
    if problem.members_per_pool is None:
        for place, (layers, members) in enumerate(pools):
            if len(members) > 1:
                for machine in members:
                    rest = tuple(other for other in members if other != machine)
                    yield (*pools[:place], (layers, rest), *pools[place + 1 :])
    if problem.pools is None:
        yield from _without(pools)


def _cuts(pools: Pools) -> Iterator[Pools]:
    """Move one layer from a stage to its neighbour."""
    for place in range(len(pools) - 1):
        (left, before), (right, after) = pools[place : place + 2]
        for shift in (-1, 1):
            if left + shift and right - shift:
                yield (*pools[:place], (left + shift, before), (right - shift, after), *pools[place + 2 :])


def _exchanged(pools: Pools) -> Iterator[Pools]:
    """Exchange the machines of two stages, with and without their numbers of layers."""
    places = range(len(pools))
    few = len(pools) <= _MOST_EXCHANGED
    for one, other in combinations(places, 2) if few else pairwise(places):
        for with_layers in (True, False):
            changed = list(pools)
            changed[one], changed[other] = pools[other], pools[one]
            if not with_layers:
                changed[one] = pools[one][0], pools[other][1]
                changed[other] = pools[other][0], pools[one][1]
            yield tuple(changed)


def _without(pools: Pools) -> Iterator[Pools]:
    """Remove a stage and give its layers to a neighbour."""
    for place, (layers, _) in enumerate(pools):
        for heir in (place - 1, place + 1):
            if 0 <= heir < len(pools):
                grown = list(pools)
                grown[heir] = pools[heir][0] + layers, pools[heir][1]
                del grown[place]
                yield tuple(grown)


def _shared(cost: TrainingCost, pools: Sequence[tuple[int, tuple[int, ...]]]) -> Layout | None:
    """Return the layout with microbatches shared out; None if a member would get none."""
    built, start = [], 0
    for layers, members in pools:
        shares = cost.shares(members, start, start + layers)
        if shares is None:
            return None
        built.append(PoolLayout(start, start + layers, members, shares))
        start += layers
    return Layout(tuple(built))
