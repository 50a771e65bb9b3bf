"""All algorithms give the bits of the summation tree, and send the bytes that the cost model predicts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.actors.transport.gloo_links import links, sum_of
from tests.platform.compression.codecs import codec
from torch import Tensor

from share_compute.compression.sums import BucketCodec
from share_compute.planning.cost.sums import traffic_of
from share_compute.protocol.collectives import ALGORITHMS, Algorithm, parts_of, routes, spread
from share_compute.protocol.tree import Node, SummationTree
from share_compute_actors.transport.collective import algorithms, routed
from share_compute_actors.transport.collective.algorithms import GlooLinks, start_sharded
from share_compute_actors.transport.collective.compressed import start_compressed
from share_compute_actors.transport.collective.expression import expression
from share_compute_actors.transport.collective.routed import start_routed
from share_compute_actors.transport.traffic import NO_LIMITS, Traffic

ROUTED: tuple[Algorithm, ...] = ("ring", "tree", "hierarchical")
LARGE = 10_001
"""Elements: several of the small pieces of these tests, and not a multiple of anything."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "PIECE_BYTES", 8192)
    monkeypatch.setattr(routed, "SHARE_BYTES", 4096)


def summed(
    algorithm: Algorithm,
    tree: SummationTree,
    held: Sequence[Sequence[Node]],
    sites: Sequence[int],
    length: int,
) -> tuple[list[Tensor], list[int]]:
    """Return the sum at each member, and the bytes that each member sent."""
    group = links(len(held))

    def member(each: GlooLinks) -> tuple[Tensor, int]:
        each.traffic = Traffic("ann", NO_LIMITS)
        parts = [sum_of(tree, node, length) for node in held[each.rank]]
        out = parts[0] if parts else torch.full((length,), torch.nan)
        if algorithm == "sharded":
            combine = expression(tree, [node for nodes in held for node in nodes])
            start_sharded(each, parts, [len(nodes) for nodes in held], combine, out)()
        else:
            own = [parts_of(route, held, tree)[each.rank] for route in routes(algorithm, held, tree, sites)]
            start_routed(each, parts, own, out)()
        return out, each.traffic.sent_bytes

    with ThreadPoolExecutor(len(group)) as pool:
        found = list(pool.map(member, group))
    return [out for out, _ in found], [sent for _, sent in found]


@pytest.mark.exact
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", range(2, 10))
def test_all_members_get_the_bits_of_one_process(size: int, algorithm: Algorithm) -> None:
    tree = SummationTree(tuple(1 + rank % 3 for rank in range(size)))
    held = [(node,) for node in tree.sums_of_runs]
    for length, sites in (
        (1, [0] * size),
        (1001, [rank * 2 // size for rank in range(size)]),
        (LARGE, range(size)),
    ):
        outs, _ = summed(algorithm, tree, held, list(sites), length)
        wanted = sum_of(tree, tree.root, length)
        assert all(torch.equal(out, wanted) for out in outs)


@pytest.mark.exact
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_after_losses_the_bits_are_the_same(data: st.DataObject) -> None:
    """Members then hold parts of several runs, or none."""
    tree = SummationTree(tuple(data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=7))))
    size = data.draw(st.integers(2, 5))
    count, members = tree.microbatches, st.integers(0, size - 1)
    owners = data.draw(st.lists(members, min_size=count, max_size=count))
    held = [tree.cover(place for place, owner in enumerate(owners) if owner == rank) for rank in range(size)]
    sites = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    outs, _ = summed(data.draw(st.sampled_from(ROUTED)), tree, held, sites, 37)
    assert all(torch.equal(out, sum_of(tree, tree.root, 37)) for out in outs)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("sites", [(0, 0, 0), (0, 0, 1, 1), (0, 1, 1, 1, 2), (0, 0, 0, 1, 1, 1)])
def test_members_send_the_bytes_that_the_cost_model_predicts(
    sites: tuple[int, ...], algorithm: Algorithm
) -> None:
    size, length = len(sites), 1440  # one piece, with equal shares
    tree = SummationTree((1,) * size)
    _, sent = summed(algorithm, tree, [(Node(rank, rank + 1),) for rank in range(size)], sites, length)
    predicted = [0.0] * size
    for (source, _), times in traffic_of(algorithm, sites).items():
        predicted[source] += times * 4 * length
    assert sent == pytest.approx(predicted)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("sites", [(0, 0, 0), (0, 0, 1, 1), (0, 1, 1, 1, 2)])
def test_compressed_runs_travel_by_the_same_algorithms(sites: tuple[int, ...], algorithm: Algorithm) -> None:
    size, length = len(sites), 900
    tree = SummationTree((1,) * size, keeps_runs_apart=True)
    held = [(Node(rank, rank + 1),) for rank in range(size)]
    one = BucketCodec(codec("int8"), ((length,),))

    def member(each: GlooLinks) -> tuple[Tensor, int]:
        each.traffic = Traffic("ann", NO_LIMITS)
        out = sum_of(tree, held[each.rank][0], length)
        start_compressed(each, [out], held, tree, one, out, spread(algorithm, sites))()
        return out, each.traffic.sent_bytes

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(member, links(size)))
    alone = sum_of(tree, Node(0, 1), length)
    parts = [sum_of(tree, node, length) for (node,) in held]
    start_compressed(
        GlooLinks(None, 0, 1), parts, [tree.sums_of_runs], tree, one, alone, spread("sharded", (0,))
    )()
    assert all(torch.equal(out, alone) for out, _ in found)
    predicted = [0.0] * size
    for (source, _), times in traffic_of(algorithm, sites, is_compressed=True).items():
        predicted[source] += times * one.num_bytes
    assert [sent for _, sent in found] == pytest.approx(predicted)
