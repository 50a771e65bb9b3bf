"""Searches of strategies: exactness on small graphs, quality on large ones."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from tests.platform.planning.operators.drawn import cost_graph, draw_graph, draw_group

from share_compute.planning.operators.cost import CostGraph
from share_compute.planning.operators.plan import plan_layer
from share_compute.planning.operators.search import (
    TooEntangled,
    dynamic_programming,
    recursive_programming,
    sharding_propagation,
)

GRAPHS = 500


def drawn_costs(draw: random.Random) -> CostGraph:
    """Return random costs of up to 8 operators with up to 4 strategies, connected at random."""
    sizes = [draw.randint(1, 4) for _ in range(draw.randint(1, 8))]
    numbers = np.random.default_rng(draw.getrandbits(32))
    density = draw.random()
    edges = {
        (i, j): numbers.random((sizes[i], sizes[j]))
        for j in range(len(sizes))
        for i in range(j)
        if draw.random() < density
    }
    return CostGraph(tuple(numbers.random(size) for size in sizes), edges)


def brute_force(costs: CostGraph) -> float:
    """Return the least total cost over all choices."""
    count = len(costs.nodes)
    total = np.zeros([len(own) for own in costs.nodes])
    for place, own in enumerate(costs.nodes):
        total += own.reshape([-1 if each == place else 1 for each in range(count)])
    for (i, j), edge in costs.edges.items():
        total += edge.reshape(
            [edge.shape[(i, j).index(each)] if each in (i, j) else 1 for each in range(count)]
        )
    return float(total.min())


def small() -> Iterator[CostGraph]:
    """Yield `GRAPHS` problems of at most 8 operators: random costs, and drawn operators with their costs."""
    for seed in range(GRAPHS):
        draw = random.Random(seed)
        costs = drawn_costs(draw)
        if seed % 2:
            graph = draw_graph(draw, draw.randint(2, 7))
            costs = cost_graph(graph, draw_group(draw, draw.choice((2, 3, 4, 8))))
        if len(costs.nodes) <= 8:
            yield costs


def test_dynamic_programming_equals_brute_force() -> None:
    tried = 0
    for costs in small():
        tried += 1
        assert costs.total(dynamic_programming(costs)) == pytest.approx(brute_force(costs), rel=1e-9)
    assert tried >= 0.75 * GRAPHS


def test_the_other_searches_are_not_better_than_exact() -> None:
    for costs in list(small())[::10]:
        best = brute_force(costs) * (1 - 1e-9)
        assert costs.total(sharding_propagation(costs)) >= best
        assert costs.total(recursive_programming([costs])) >= best


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_quality_at_a_thousand_operators(seed: int) -> None:
    draw = random.Random(seed)
    devices = (2, 4, 8, 6)[seed]
    graph, group = draw_graph(draw, 1000), draw_group(draw, devices)
    exact = plan_layer(graph, group).seconds
    assert plan_layer(graph, group, search="sharding_propagation").seconds <= 1.1 * exact
    assert plan_layer(graph, group, search="recursive_programming").seconds <= 1.05 * exact


def test_propagation_from_given_strategies() -> None:
    draw = random.Random(0)
    graph, group = draw_graph(draw, 1000), draw_group(draw, 4)
    forked, costs = graph.forked(), cost_graph(graph, group)
    best = dynamic_programming(costs)
    given = {place: best[place] for place, each in enumerate(forked.operators) if each.kind == "matmul"}
    found = sharding_propagation(costs, given)
    assert all(found[place] == strategy for place, strategy in given.items())
    assert costs.total(found) <= 1.1 * costs.total(best)


def test_entangled_graphs_need_recursion() -> None:
    numbers = np.random.default_rng(0)
    count = 30
    edges = {(i, j): numbers.random((5, 5)) for j in range(count) for i in range(j)}
    costs = CostGraph(tuple(numbers.random(5) for _ in range(count)), edges)
    with pytest.raises(TooEntangled) as caught:
        dynamic_programming(costs)
    assert "recursive_programming" in str(caught.value.hint)
    found = recursive_programming([costs])
    drawn = min(costs.total(numbers.integers(0, 5, count).tolist()) for _ in range(100))
    assert costs.total(found) < drawn
