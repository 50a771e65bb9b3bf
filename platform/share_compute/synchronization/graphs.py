"""Graphs of branches that average with each other (gossip), and the weights of their edges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from share_compute.errors import UserError
from share_compute.models.cells import derive_seed
from share_compute.specification.synchronization import Graph
from share_compute.synchronization.records import Branch

Edge: TypeAlias = tuple[Branch, Branch]
"""Two branches, the smaller number first."""
Mixing: TypeAlias = Mapping[Branch, Mapping[Branch, float]]
"""Weight of each neighbour of each branch, in ascending order. A branch's own weight is the rest to 1."""


def ring(branches: int) -> set[Edge]:
    """Return the edges between branches at distance 1 on a ring."""
    return _circulant(branches, [1])


def exponential(branches: int) -> set[Edge]:
    """Return the edges between branches at distances 1, 2, 4, ... on a ring.

    Source: the static exponential graph (Ying et al. 2021, arXiv 2110.13363), here with edges in both directions.
    """
    return _circulant(branches, [2**power for power in range((branches - 1).bit_length())])


def random_pairs(branches: int, seed: int, number: int) -> set[Edge]:
    """Return disjoint pairs of branches, drawn at random for a round; with an odd number, one branch is alone.

    Source: NoLoCo (Kolehmainen et al. 2025, arXiv 2506.10911).

    Args:
        branches: number of branches.
        seed: seed of the job.
        number: the round.
    """
    order = sorted(range(branches), key=lambda branch: derive_seed("pairs", seed, number, branch))
    return {_edge(*pair) for pair in zip(order[::2], order[1::2], strict=False)}


def edges_of(graph: Graph, branches: int, seed: int, number: int, measured: Iterable[Edge] = ()) -> set[Edge]:
    """Return the edges of a round.

    Args:
        graph: kind of the graph.
        branches: number of branches.
        seed: seed of the job.
        number: the round.
        measured: edges derived from measured links; they stay the same for the whole job.

    Raises:
        UserError: the measured edges do not connect all branches.
    """
    match graph:
        case "ring":
            return ring(branches)
        case "exponential":
            return exponential(branches)
        case "random_pairs":
            return random_pairs(branches, seed, number)
        case "measured":
            edges = {_edge(*pair) for pair in measured}
            require_connected(edges, branches)
            return edges


def require_connected(edges: Iterable[Edge], branches: int) -> None:
    """Check that the nodes of a graph are the branches, and that the graph is connected.

    Raises:
        UserError: the graph is not connected, or has an edge to an unknown branch or from a branch to itself.
    """
    neighbours = defaultdict(set)
    for one, other in edges:
        if one == other or not {one, other} <= set(range(branches)):
            raise UserError(
                f"training.synchronization.graph: edge {one}-{other} does not join two of {branches} branches",
                hint="choose another graph, for example exponential",
            )
        neighbours[one].add(other)
        neighbours[other].add(one)
    reached, todo = {0}, [0]
    while todo:
        new = neighbours[todo.pop()] - reached
        reached |= new
        todo += new
    if missing := sorted(set(range(branches)) - reached):
        raise UserError(
            f"training.synchronization.graph: no path leads from branch 0 to branch {missing[0]}",
            hint="choose another graph, for example exponential",
        )


def metropolis_weights(edges: Iterable[Edge], branches: int) -> Mixing:
    """Return the weight of each edge: 1 / (1 + the larger degree of its ends).

    The matrix of weights is symmetric and doubly stochastic, so averaging keeps the mean of all branches. This also
    holds without some edges, if each branch keeps the weight of its missing neighbours for itself.

    Source: Xiao, Boyd and Lall 2005, doi 10.1109/IPSN.2005.1440896, eq. 6.
    """
    edges = sorted(edges)
    degree: defaultdict[Branch, int] = defaultdict(int)
    for edge in edges:
        for branch in edge:
            degree[branch] += 1
    weights: dict[Branch, dict[Branch, float]] = {branch: {} for branch in range(branches)}
    for one, other in edges:
        weight = 1.0 / (1 + max(degree[one], degree[other]))
        weights[one][other] = weights[other][one] = weight
    return {branch: dict(sorted(row.items())) for branch, row in weights.items()}


def _circulant(branches: int, distances: Iterable[int]) -> set[Edge]:
    pairs = ((branch, (branch + distance) % branches) for branch in range(branches) for distance in distances)
    return {_edge(one, other) for one, other in pairs if one != other}


def _edge(one: Branch, other: Branch) -> Edge:
    return (one, other) if one < other else (other, one)
