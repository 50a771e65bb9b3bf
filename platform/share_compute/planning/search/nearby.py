"""Yields neighbors of a layout for a local search.

In each neighbor, one cut is moved by a layer, two stages or only their machines are exchanged, or one machine or
stage is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.search.problem import SearchProblem

_MOST_EXCHANGED = 12
"""Maximum number of stages for which all pairs are exchanged; with more stages, only neighboring pairs are."""

Stages = tuple[tuple[int, tuple[int, ...]], ...]
"""(number of layers, members) of each stage."""


def nearby(problem: SearchProblem, layout: Layout) -> Iterator[Layout]:
    """Yield neighbors of ``layout`` that have the requested numbers of stages and members."""
    stages = tuple((stage.stop - stage.start, stage.members) for stage in layout.stages)
    for changed in _changed(problem, stages):
        shared = _shared(problem.cost, changed)
        if shared is not None:
            yield shared


def _changed(problem: SearchProblem, stages: Stages) -> Iterator[Stages]:
    yield from _cuts(stages)
    yield from _exchanged(stages)
    if problem.members_per_stage is None:
        for place, (layers, members) in enumerate(stages):
            if len(members) > 1:
                for machine in members:
                    rest = tuple(other for other in members if other != machine)
                    yield (*stages[:place], (layers, rest), *stages[place + 1 :])
    if problem.stages is None:
        yield from _without(stages)


def _cuts(stages: Stages) -> Iterator[Stages]:
    """Yield variants in which one layer moves to a neighboring stage."""
    for place in range(len(stages) - 1):
        (left, before), (right, after) = stages[place : place + 2]
        for shift in (-1, 1):
            if left + shift and right - shift:
                yield (*stages[:place], (left + shift, before), (right - shift, after), *stages[place + 2 :])


def _exchanged(stages: Stages) -> Iterator[Stages]:
    """Yield variants in which two stages exchange their machines, with and without their numbers of layers."""
    places = range(len(stages))
    few = len(stages) <= _MOST_EXCHANGED
    for one, other in combinations(places, 2) if few else pairwise(places):
        for with_layers in (True, False):
            changed = list(stages)
            changed[one], changed[other] = stages[other], stages[one]
            if not with_layers:
                changed[one] = stages[one][0], stages[other][1]
                changed[other] = stages[other][0], stages[one][1]
            yield tuple(changed)


def _without(stages: Stages) -> Iterator[Stages]:
    """Yield variants in which one stage is removed and its layers move to a neighboring stage."""
    for place, (layers, _) in enumerate(stages):
        for heir in (place - 1, place + 1):
            if 0 <= heir < len(stages):
                grown = list(stages)
                grown[heir] = stages[heir][0] + layers, stages[heir][1]
                del grown[place]
                yield tuple(grown)


def _shared(cost: TrainingCost, stages: Sequence[tuple[int, tuple[int, ...]]]) -> Layout | None:
    """Return the layout of these stages with shares of microbatches; None if a member would get no microbatch."""
    built, start = [], 0
    for layers, members in stages:
        shares = cost.shares(members, start, start + layers)
        if shares is None:
            return None
        built.append(StageLayout(start, start + layers, members, shares))
        start += layers
    return Layout(tuple(built))
