"""Reduce-scatter and all-gather between members with shares of different sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.actors.transport.gloo_links import links
from tests.platform.compression.codecs import drawn
from torch import Tensor

from share_compute.protocol.tree import Node, SummationTree
from share_compute_actors.transport.collective.algorithms import (
    PIECE_BYTES,
    GlooLinks,
    start_allgather,
    start_reduce_scatter,
)
from share_compute_actors.transport.collective.expression import expression


def shares_of(lengths: Sequence[int]) -> list[slice]:
    """Return consecutive ranges with these lengths."""
    return [slice(start, stop) for start, stop in pairwise([0, *accumulate(lengths)])]


def sum_of(tree: SummationTree, node: Node, size: int) -> Tensor:
    """Return the sum of the microbatches of a node, in the order of the tree."""
    children = tree.children(node)
    if children is None:
        return drawn(size, seed=node.start)
    return sum_of(tree, children[0], size) + sum_of(tree, children[1], size)


def by_all(count: int, work: Callable[[GlooLinks], Tensor]) -> list[Tensor]:
    """Return what each member of a group returns."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, links(count)))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_a_share_has_the_bits_of_the_whole_sum(runs: list[int], data: st.DataObject) -> None:
    tree = SummationTree(tuple(runs))
    count = data.draw(st.integers(2, 4))
    shares = shares_of(data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count)))
    ranks = st.integers(0, count - 1)
    owners = data.draw(st.lists(ranks, min_size=tree.microbatches, max_size=tree.microbatches))
    held = [tree.cover([each for each, owner in enumerate(owners) if owner == rank]) for rank in range(count)]
    size = shares[-1].stop

    def member(each: GlooLinks) -> Tensor:
        parts = [sum_of(tree, node, size) for node in held[each.rank]]
        out = parts[0] if parts else torch.full((size,), torch.nan)
        combine = expression(tree, [node for nodes in held for node in nodes])
        start_reduce_scatter(each, parts, [len(nodes) for nodes in held], shares, combine, out)()
        return out[shares[each.rank]]

    assert torch.equal(torch.cat(by_all(count, member)), sum_of(tree, tree.root, size))


@pytest.mark.parametrize("lengths", [(5, 0, 2), (PIECE_BYTES // 4, 3, PIECE_BYTES // 8)])
def test_all_members_get_all_shares(lengths: tuple[int, ...]) -> None:
    shares = shares_of(lengths)

    def member(each: GlooLinks) -> Tensor:
        tensor = torch.full((shares[-1].stop,), -1.0)
        tensor[shares[each.rank]] = float(each.rank)
        start_allgather(each, tensor, shares)()
        return tensor

    wanted = torch.cat([torch.full((length,), float(rank)) for rank, length in enumerate(lengths)])
    for found in by_all(len(lengths), member):
        assert torch.equal(found, wanted)
