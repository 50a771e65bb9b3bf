"""Local search: changes the order of a good layout's machines, and searches each changed order for faster layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout
from share_compute.planning.cost.options import Options
from share_compute.planning.search.fixed_order import best_in_order
from share_compute.planning.search.labels import Suffixes
from share_compute.planning.search.limits import SearchLimits, limits_for

_BUDGET: Final = 30_000_000
"""Approximate number of candidates that one call of `improve` examines before it stops."""
_MOST_TRIES: Final = 400
_SPARES: Final = 6
"""Maximum number of machines without layers that moves insert into the order."""


def improve(
    cost: TrainingCost,
    options: Options,
    rates: Mapping[int, float],
    layout: Layout,
    sizes: Sequence[int],
    stages: int | None,
    limits: SearchLimits | None = None,
) -> Iterator[Layout]:
    """Yield layouts, each faster than the one before, starting from a good layout.

    A move puts one machine at another place in the order, exchanges two machines, or inserts machines without layers.
    After each move, the cuts, the machines to leave out and the members of each stage are searched again. ``limits``
    replaces the default limits for the number of machines.
    """
    best_s, examined, tries = cost.step_s(layout), 0, 0
    order, moved = layout.machines, True
    while moved:
        moved = False
        for candidate in _neighbours(order, _spares(cost, rates, order)):
            suffixes = Suffixes(cost, options, best_s)
            width = (limits or limits_for(len(candidate))).width_of(cost, len(candidate))
            few = sizes if width is None else [size for size in sizes if size <= 4]
            ids = best_in_order(suffixes, candidate, sizes=few or sizes, stages=stages, width=width)
            examined, tries = examined + suffixes.examined, tries + 1
            if ids:
                layout = suffixes.layout(ids[0])
                best_s, order, moved = cost.step_s(layout), layout.machines, True
                yield layout
                break
            if examined > _BUDGET or tries >= _MOST_TRIES:
                return


def _spares(cost: TrainingCost, rates: Mapping[int, float], order: Sequence[int]) -> list[int]:
    """Return machines without layers: the fastest ones, and the ones with the most memory."""
    used = set(order)
    free = [machine for machine in rates if machine not in used]
    fast = sorted(free, key=lambda machine: (-rates[machine], machine))[: _SPARES // 2]
    large = sorted(free, key=lambda machine: (-cost.memory_bytes[machine], machine))[:_SPARES]
    return list(dict.fromkeys([*fast, *large]))[:_SPARES]


def _neighbours(order: Sequence[int], spares: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the orders that result from one move."""
    yield (*order, *spares)
    yield (*spares, *order)
    for spare in spares:
        for place in range(len(order) + 1):
            yield (*order[:place], spare, *order[place:])
    for first in range(len(order)):
        for second in range(first + 1, len(order)):
            exchanged = list(order)
            exchanged[first], exchanged[second] = order[second], order[first]
            yield tuple(exchanged)
    for machine in order:
        rest = [other for other in order if other != machine]
        for place in range(len(order)):
            moved = (*rest[:place], machine, *rest[place:])
            if moved != tuple(order):
                yield moved
