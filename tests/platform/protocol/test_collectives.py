"""Routes of gradient sums: every root completes the expression of the summation tree, and sites are crossed once."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from share_compute.protocol.collectives import (
    ALGORITHMS,
    Held,
    parts_of,
    routes,
    spread,
    spread_traffic,
    traffic,
)
from share_compute.protocol.tree import Node, SummationTree
from share_compute.specification import Collective

Expression = Any
"""A microbatch, or a pair of expressions."""


def expression(tree: SummationTree, node: Node) -> Expression:
    children = tree.children(node)
    return node.start if children is None else (expression(tree, children[0]), expression(tree, children[1]))


def runs(size: int) -> tuple[SummationTree, Held]:
    """Return a tree, and one run for each of the members."""
    tree = SummationTree((1,) * size)
    return tree, [(node,) for node in tree.sums_of_runs]


@settings(deadline=None)
@given(st.data())
def test_each_share_is_added_in_the_order_of_the_tree(data: st.DataObject) -> None:
    """This also holds after losses, when a member has parts of several runs, or none."""
    tree = SummationTree(tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=8))))
    size = data.draw(st.integers(2, 9))
    count, members = tree.microbatches, st.integers(0, size - 1)
    owners = data.draw(st.lists(members, min_size=count, max_size=count))
    held = [tree.cover(place for place, owner in enumerate(owners) if owner == rank) for rank in range(size)]
    sites = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    for route in routes(data.draw(st.sampled_from(ALGORITHMS)), held, tree, sites):
        parts = parts_of(route, held, tree)
        sent: dict[int, list[Expression]] = {}
        for rank in sorted(range(size), key=lambda rank: parts[rank].up_tick):
            part = parts[rank]
            values = [expression(tree, node) for node in held[rank]]
            for source, number in part.arriving:
                assert parts[source].up == rank
                assert parts[source].up_tick < part.up_tick
                assert len(sent[source]) == number
                values += sent[source]
            for left, right in part.merge.additions:
                values[left] = values[left], values[right]
            sent[rank] = [values[place] for _, place in part.merge.kept]
        assert sent[route.root] == [expression(tree, tree.root)]
        for rank, part in enumerate(parts):
            assert (part.down is None) == (rank == route.root)
            if part.down is not None:
                assert rank in parts[part.down].receivers
                assert parts[part.down].down_tick < part.down_tick
                assert part.up_tick < part.down_tick


@pytest.mark.parametrize("size", range(2, 17))
def test_traffic_follows_the_formulas(size: int) -> None:
    tree, held = runs(size)
    found = {
        name: traffic(parts_of(route, held, tree) for route in routes(name, held, tree, (0,) * size))
        for name in ALGORITHMS
    }
    for sizes in (found["sharded"], found["hierarchical"]):
        assert sizes == {
            (one, other): pytest.approx(2 / size)
            for one in range(size)
            for other in range(size)
            if one != other
        }
    assert set(found["ring"]) == {(rank, (rank + 1) % size) for rank in range(size)}
    assert all(sizes >= 2 * (size - 1) / size - 1e-9 for sizes in found["ring"].values())
    assert sum(found["tree"].values()) == 2 * (size - 1)


@pytest.mark.parametrize(
    "counts",
    [(1, 1), (2, 2), (1, 3), (3, 1), (3, 2), (4, 4), (2, 5), (1, 8), (2, 2, 2), (1, 2, 3), (3, 3, 3, 3)],
)
def test_between_sites_only_representatives_exchange_sums(counts: tuple[int, ...]) -> None:
    sites = [site for site, count in enumerate(counts) for _ in range(count)]
    tree, held = runs(len(sites))
    found = routes("hierarchical", held, tree, sites)
    sizes = traffic(parts_of(route, held, tree) for route in found)
    crossing = {pair: size for pair, size in sizes.items() if sites[pair[0]] != sites[pair[1]]}
    ends = {rank for pair in crossing for rank in pair}
    assert sorted(sites[rank] for rank in ends) == list(range(len(counts)))
    if len(counts) == 2:
        assert list(crossing.values()) == [1.0, 1.0]  # the sum crosses once in each direction


def test_unequal_sites_exchange_at_most_twice_the_sum() -> None:
    """The tree may leave a site with several partial sums."""
    most = {}
    for size in range(2, 13):
        tree, held = runs(size)
        for first in range(1, size):
            sites = [0] * first + [1] * (size - first)
            found = routes("hierarchical", held, tree, sites)
            sizes = traffic(parts_of(route, held, tree) for route in found)
            most[first, size - first] = max(
                sum(moved for (one, other), moved in sizes.items() if sites[one] == site != sites[other])
                for site in (0, 1)
            )
    assert most[4, 2] == 1.5
    assert max(most.values()) == 2.0
    assert all(most[count, count] == 1.0 for count in range(1, 7))


@pytest.mark.parametrize("lost", range(6))
def test_another_member_represents_a_site_that_lost_its_representative(lost: int) -> None:
    """The others compute the lost member's run again."""
    sites = [0, 0, 0, 1, 1, 1]
    tree = SummationTree((1,) * 6)
    left = [rank for rank in range(6) if rank != lost]
    owner = left[0 if sites[left[0]] == sites[lost] else -1]
    after = [tree.cover([rank, lost] if rank == owner else [rank]) for rank in left]
    found = routes("hierarchical", after, tree, [sites[rank] for rank in left])
    sizes = traffic(parts_of(route, after, tree) for route in found)
    ends = {left[rank] for pair in sizes for rank in pair if sites[left[pair[0]]] != sites[left[pair[1]]]}
    assert len(ends) == 2
    assert lost not in ends


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("sites", [(0, 0), (0, 0, 1, 1, 1), (0, 1, 0, 2, 1, 0), (0, 1, 2)])
def test_every_rank_is_reached_once(algorithm: str, sites: tuple[int, ...]) -> None:
    for route in spread(algorithm, sites):  # type: ignore[arg-type]
        reached = {route.root}
        for _ in sites:
            reached |= {rank for rank, source in enumerate(route.down) if source in reached}
        assert reached == set(range(len(sites)))
    crossing = sum(
        size
        for (one, other), size in spread_traffic(spread("hierarchical", sites)).items()
        if sites[one] != sites[other]
    )
    assert crossing == len(sites) * (len(set(sites)) - 1)


def test_the_job_file_names_all_algorithms() -> None:
    assert set(get_args(Collective)) == {"auto", *ALGORITHMS}
