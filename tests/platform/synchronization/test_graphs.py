"""Graphs of gossip: their edges, and matrices that keep the mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from share_compute.errors import UserError
from share_compute.synchronization.graphs import (
    edges_of,
    exponential,
    metropolis_weights,
    random_pairs,
    require_connected,
    ring,
)


def test_the_graphs_are_those_of_the_papers() -> None:
    assert ring(2) == {(0, 1)}
    assert ring(4) == {(0, 1), (1, 2), (2, 3), (0, 3)}
    assert exponential(4) == {(0, 1), (1, 2), (2, 3), (0, 3), (0, 2), (1, 3)}
    assert {edge for edge in exponential(16) if 0 in edge} == {(0, each) for each in (1, 2, 4, 8, 12, 14, 15)}


@given(st.integers(1, 40), st.integers(0, 2**63 - 1), st.integers(1, 1000))
def test_random_pairs_are_disjoint_and_depend_on_seed_and_round_alone(
    branches: int, seed: int, number: int
) -> None:
    pairs = random_pairs(branches, seed, number)
    assert pairs == random_pairs(branches, seed, number)
    ends = [branch for pair in pairs for branch in pair]
    assert len(ends) == len(set(ends)) == branches - branches % 2
    assert set(ends) <= set(range(branches))


def test_random_pairs_differ_between_rounds_and_seeds() -> None:
    drawn = {frozenset(random_pairs(8, seed, number)) for seed in range(5) for number in range(20)}
    assert len(drawn) > 50
    met = {pair for number in range(100) for pair in random_pairs(8, 0, number)}
    assert len(met) == 8 * 7 / 2


@pytest.mark.parametrize("graph", ["ring", "exponential", "random_pairs"])
@pytest.mark.parametrize("branches", [2, 3, 7, 16])
def test_weights_are_symmetric_and_doubly_stochastic(graph: str, branches: int) -> None:
    weights = metropolis_weights(edges_of(graph, branches, 3, 1), branches)  # type: ignore[arg-type]
    matrix = np.zeros((branches, branches))
    for branch, row in weights.items():
        assert list(row) == sorted(row)
        for neighbour, weight in row.items():
            matrix[branch, neighbour] = weight
    matrix += np.diag(1 - matrix.sum(1))
    assert (matrix >= 0).all()
    assert (np.diag(matrix) > 0).all()
    assert np.array_equal(matrix, matrix.T)
    assert matrix.sum(0) == pytest.approx(1.0)


def test_a_measured_graph_is_given_and_connects_all_branches() -> None:
    assert edges_of("measured", 3, 0, 1, [(2, 0), (0, 1)]) == {(0, 2), (0, 1)}
    for edges, problem in (
        ([(0, 1)], "no path leads from branch 0 to branch 2"),
        ([(0, 1), (1, 1), (1, 2)], "edge 1-1"),
        ([(0, 1), (1, 2), (2, 3)], "edge 2-3"),
    ):
        with pytest.raises(UserError, match=problem):
            edges_of("measured", 3, 0, 1, edges)


@pytest.mark.parametrize("branches", [1, 2, 5, 9])
def test_rings_and_exponential_graphs_are_connected(branches: int) -> None:
    require_connected(ring(branches), branches)
    require_connected(exponential(branches), branches)
