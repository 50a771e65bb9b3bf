"""Searches for the strategies of all operators with the least total cost.

All three take a `CostGraph`: unary costs of strategies, and costs of pairs on the edges.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from share_compute.errors import UserError
from share_compute.planning.operators.cost import CostGraph, Costs

_MOST_ENTRIES = 2**22
"""Maximum size of a table of dynamic programming."""
_SWEEPS = 2
"""Number of times that propagation reconsiders each operator."""
_WINDOW = 48
"""Number of operators that double recursion solves exactly at once."""
_PASSES = 2
"""Number of times that double recursion halves the operators for each number of devices."""


class TooEntangled(UserError):
    """Error: the graph has too many parallel branches for exact dynamic programming."""

    code = "operators-entangled"


class _Table(NamedTuple):
    scope: tuple[int, ...]
    """Operators of the table's dimensions."""
    costs: Costs


class _Eliminated(NamedTuple):
    operator: int
    neighbours: tuple[int, ...]
    best: np.ndarray
    """Best strategy of the operator, for each choice of its neighbours' strategies."""


def dynamic_programming(costs: CostGraph) -> list[int]:
    """Return the strategies with the least total cost, exactly.

    Operators are eliminated one after the other (non-serial dynamic programming, Bertelè and Brioschi, 1972; for
    operators as in OptCNN, Jia et al., 2018). For operator i with neighbours N, the recurrence is
    ``f(N) = min over s_i of (sum of all tables with i)``: a new table over N. The operator with the smallest new table
    is next. On a chain this is the algorithm of Viterbi.

    Raises:
        TooEntangled: a table would have more than `_MOST_ENTRIES` entries.
    """
    return _solve(costs, range(len(costs.nodes)), {})


def _solve(costs: CostGraph, free: Iterable[int], decided: Mapping[int, int]) -> list[int]:
    """Return the best strategies of the operators ``free``, in order, given the strategies of decided neighbours."""
    order = list(free)
    inside = set(order)
    tables: dict[int, list[_Table]] = {one: [] for one in order}
    near: dict[int, set[int]] = {one: set() for one in order}
    for one in order:
        unary = costs.nodes[one]
        for other, edge in costs.neighbours[one].items():
            if other in inside:
                near[one].add(other)
                if one < other:
                    table = _Table((one, other), edge)
                    tables[one].append(table)
                    tables[other].append(table)
            elif other in decided:
                unary = unary + edge[:, decided[other]]
        tables[one].append(_Table((one,), unary))
    sizes = {one: len(costs.nodes[one]) for one in order}
    steps = list[_Eliminated]()
    while near:
        one = min(near, key=lambda each: (math.prod(sizes[other] for other in near[each]), each))
        steps.append(_eliminate(one, near, tables, sizes))
    choice: dict[int, int] = {}
    for step in reversed(steps):
        choice[step.operator] = int(step.best[tuple(choice[other] for other in step.neighbours)])
    return [choice[one] for one in order]


def _eliminate(
    one: int,
    near: dict[int, set[int]],
    tables: dict[int, list[_Table]],
    sizes: Mapping[int, int],
) -> _Eliminated:
    around = tuple(sorted(near.pop(one)))
    scope = (*around, one)
    shape = tuple(sizes[each] for each in scope)
    if math.prod(shape) > _MOST_ENTRIES:
        raise TooEntangled(
            f"dynamic programming needs a table of {math.prod(shape):,} entries, because {len(around)} operators are "
            "connected with one",
            hint="search with recursive_programming",
        )
    total = np.zeros(shape)
    for table in tables.pop(one):
        total = total + _spread(table, scope)
        for other in table.scope:
            if other != one:
                tables[other] = [each for each in tables[other] if each is not table]
    reduced = _Table(around, total.min(axis=-1))
    for other in around:
        near[other] = (near[other] | set(around)) - {one, other}
        tables[other].append(reduced)
    return _Eliminated(one, around, total.argmin(axis=-1))


def _spread(table: _Table, scope: tuple[int, ...]) -> Costs:
    """Return a table with dimensions in the order of ``scope``, of size 1 for operators that the table lacks."""
    order = sorted(range(len(table.scope)), key=lambda place: scope.index(table.scope[place]))
    moved = table.costs.transpose(order)
    sizes = iter(moved.shape)
    return moved.reshape([next(sizes) if each in table.scope else 1 for each in scope])


def sharding_propagation(costs: CostGraph, given: Mapping[int, int] | None = None) -> list[int]:
    """Return strategies that follow from given ones, with the least cost of redistributions and of the operators.

    Operators are reached from the given ones over the edges that matter most: a maximum spanning tree (Prim), by the
    range of the costs of an edge. On a tree, min-sum message passing is exact: for each strategy of its parent, an
    operator reports the least cost of its own subtree. Then strategies are chosen from the given ones outwards, with
    all edges to decided operators. The messages ignore edges outside the tree, so each operator is finally reconsidered
    `_SWEEPS` times. Sources: GSPMD (Xu et al., 2021), MindSpore's sharding propagation.

    Args:
        costs: costs of all strategies.
        given: index of the strategy of some operators; these are kept.
    """
    given = given or {}
    order, parent = _spanning_tree(costs, given)
    beliefs = list(costs.nodes)
    for one, strategy in given.items():
        beliefs[one] = np.where(np.arange(len(beliefs[one])) == strategy, beliefs[one], np.inf)
    for one in reversed(order):
        if one in parent:
            edge = costs.neighbours[parent[one]][one]
            beliefs[parent[one]] = beliefs[parent[one]] + (edge + beliefs[one]).min(axis=1)
    choice: dict[int, int] = {}
    for one in order:
        choice[one] = _best(costs, one, beliefs[one], choice)
    for one in [each for each in order if each not in given] * _SWEEPS:
        choice[one] = _best(costs, one, costs.nodes[one], choice)
    return [choice[one] for one in range(len(costs.nodes))]


def _best(costs: CostGraph, one: int, own: Costs, choice: Mapping[int, int]) -> int:
    """Return the best strategy of an operator, given the strategies of decided neighbours."""
    total = own
    for other, edge in costs.neighbours[one].items():
        if other in choice:
            total = total + edge[:, choice[other]]
    return int(total.argmin())


def _spanning_tree(costs: CostGraph, roots: Iterable[int]) -> tuple[list[int], dict[int, int]]:
    """Return the operators in the order in which a maximum spanning tree reaches them, and the parent of each."""
    order, parent = list[int](), dict[int, int]()
    reached: set[int] = set()
    for root in (*roots, *range(len(costs.nodes))):
        heap = [(0.0, root, root)]
        while heap:
            _, one, source = heapq.heappop(heap)
            if one in reached:
                continue
            reached.add(one)
            order.append(one)
            if one != source:
                parent[one] = source
            for other, edge in costs.neighbours[one].items():
                heapq.heappush(heap, (-float(np.ptp(edge)), other, one))
    return order, parent


def recursive_programming(levels: Sequence[CostGraph]) -> list[int]:
    """Return strategies by double recursion, over the devices and over the operators.

    The devices are halved recursively: the solution for n devices begins with that for n / 2. For each number of
    devices, the operators are halved recursively until `_WINDOW` of them are left. These are solved exactly while all
    others keep their strategies. Then the operators around the cut are solved again. The time is linear in the number
    of operators, whatever the structure of the graph.

    Source: D-Rec (Wang et al., 2021, "Efficient and systematic partitioning of large and deep neural networks for
    parallelization"), the double recursive strategy search of MindSpore. It decides one operator at a time.

    Args:
        levels: costs of the same strategies on growing numbers of devices, such as 2, 4 and 8.
    """
    choice: dict[int, int] = {}
    for costs in levels:
        for _ in range(_PASSES):
            _halve(costs, 0, len(costs.nodes), choice)
    return [choice[one] for one in range(len(levels[-1].nodes))]


def _halve(costs: CostGraph, start: int, stop: int, choice: dict[int, int]) -> None:
    if stop - start <= _WINDOW:
        _improve(costs, range(start, stop), choice)
        return
    middle = (start + stop) // 2
    _halve(costs, start, middle, choice)
    _halve(costs, middle, stop, choice)
    _improve(costs, range(middle - _WINDOW // 2, middle + _WINDOW // 2), choice)


def _improve(costs: CostGraph, window: Sequence[int], choice: dict[int, int]) -> None:
    """Solve the operators of a window exactly, given the operators around it; halve a window that is too entangled."""
    try:
        found = _solve(costs, window, choice)
    except TooEntangled:
        half = len(window) // 2
        _improve(costs, window[:half], choice)
        _improve(costs, window[half:], choice)
        return
    choice.update(zip(window, found, strict=True))
