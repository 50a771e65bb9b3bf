"""Every layout there is, one after the other: slow, simple, and made of nothing that the search is made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

from share_compute.planning.cost import TrainingCost
from share_compute.planning.layout import Layout, PoolLayout

Groups = tuple[tuple[int, ...], ...]


def ordered_groups(machines: frozenset[int]) -> Iterator[Groups]:
    """Yield all sequences of disjoint sets of some of the machines."""
    for size in range(1, len(machines) + 1):
        for first in combinations(sorted(machines), size):
            yield (first,)
            for rest in ordered_groups(machines - frozenset(first)):
                yield (first, *rest)


def groups_in_order(order: Sequence[int]) -> Iterator[Groups]:
    """Yield all sequences of runs of neighbours in the order; machines before, between and behind are skipped."""
    for begin in range(len(order)):
        for end in range(begin + 1, len(order) + 1):
            run = tuple(sorted(order[begin:end]))
            yield (run,)
            for rest in groups_in_order(order[end:]):
                yield (run, *rest)


def layouts(cost: TrainingCost, groups: Groups) -> Iterator[Layout]:
    """Yield all ways to cut the layers over these pools."""
    if len(groups) > cost.num_layers or not all(cost.may_pool(members) for members in groups):
        return
    for cuts in combinations(range(1, cost.num_layers), len(groups) - 1):
        edges = (0, *cuts, cost.num_layers)
        shares = [cost.shares(members, edges[at], edges[at + 1]) for at, members in enumerate(groups)]
        if all(share is not None for share in shares):
            yield Layout(
                tuple(
                    PoolLayout(edges[at], edges[at + 1], members, shares[at] or ())
                    for at, members in enumerate(groups)
                )
            )


def best(cost: TrainingCost, all_groups: Iterator[Groups]) -> tuple[float, Layout | None]:
    """Return the smallest step that any feasible layout takes."""
    smallest, chosen = math.inf, None
    for groups in all_groups:
        for layout in layouts(cost, groups):
            step_s = cost.step_s(layout)
            if step_s < smallest and cost.fits(layout):
                smallest, chosen = step_s, layout
    return smallest, chosen
