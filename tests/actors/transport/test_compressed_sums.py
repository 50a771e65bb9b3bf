"""Members of a stage add compressed runs: the same bits, whichever members computed the microbatches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.actors.transport.gloo_links import links
from tests.platform.compression.codecs import codec, drawn
from torch import Tensor

from share_compute.compression.sums import BucketCodec
from share_compute.protocol.collectives import spread
from share_compute.protocol.tree import Node, SummationTree
from share_compute_actors.transport.collective.algorithms import GlooLinks
from share_compute_actors.transport.collective.compressed import start_compressed

SHAPES = ((30, 20), (300,))
SIZE = 900


def sum_of(tree: SummationTree, node: Node) -> Tensor:
    """Return the sum of the microbatches of a node, none of them rounded."""
    children = tree.children(node)
    if children is None:
        return drawn(SIZE, seed=node.start) * 10.0 ** (node.start % 5)
    return sum_of(tree, children[0]) + sum_of(tree, children[1])


def summed(group: list[GlooLinks], tree: SummationTree, holdings: list[list[int]], name: str) -> list[Tensor]:
    """Return the sum at each member, for the microbatches that each member computed."""
    held = [tree.cover(ids) for ids in holdings]
    one = BucketCodec(codec(name), SHAPES)

    def member(each: GlooLinks) -> Tensor:
        parts = [sum_of(tree, node) for node in held[each.rank]]
        out = parts[0] if parts else torch.full((SIZE,), torch.nan)
        start_compressed(each, parts, held, tree, one, out, spread("sharded", (0,) * len(group)))()
        return out

    with ThreadPoolExecutor(len(group)) as pool:
        return list(pool.map(member, group))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5), st.sampled_from(["none", "int8", "topk"]), st.data()
)
def test_all_members_get_the_bits_that_one_member_gets(
    runs: list[int], name: str, data: st.DataObject
) -> None:
    tree = SummationTree(tuple(runs), keeps_runs_apart=True)
    (expected,) = summed([GlooLinks(None, 0, 1)], tree, [list(range(tree.microbatches))], name)
    size = data.draw(st.integers(2, 3))
    owners = data.draw(
        st.lists(st.integers(0, size - 1), min_size=tree.microbatches, max_size=tree.microbatches)
    )
    holdings = [[place for place, owner in enumerate(owners) if owner == rank] for rank in range(size)]
    for found in summed(links(size), tree, holdings, name):
        assert torch.equal(found, expected)


def test_without_codec_the_sum_is_that_of_the_tree() -> None:
    plain = SummationTree((3, 1, 2))
    tree = SummationTree((3, 1, 2), keeps_runs_apart=True)
    (found,) = summed([GlooLinks(None, 0, 1)], tree, [list(range(6))], "none")
    assert torch.equal(found, sum_of(plain, plain.root))


@pytest.mark.parametrize("holdings", [[[0, 1], [3]], [[0, 1, 2], [2, 3]], [[], []]])
def test_sums_that_are_not_whole_are_refused(holdings: list[list[int]]) -> None:
    tree = SummationTree((2, 2), keeps_runs_apart=True)
    held = [tree.cover(ids) for ids in holdings]
    one = BucketCodec(codec("int8"), SHAPES)
    with pytest.raises(ValueError, match=r"not the sum|held twice|no member holds"):
        start_compressed(
            GlooLinks(None, 0, 2), [], held, tree, one, torch.empty(SIZE), spread("sharded", (0, 0))
        )


def test_a_run_is_sent_once_to_each_other_member() -> None:
    """With one run at each of two members, the bytes that a member sends are those of one payload."""
    tree = SummationTree((2, 2), keeps_runs_apart=True)
    sent: list[int] = []

    class Counted(GlooLinks):
        def send(self, tensor: Tensor, to: int, tag: int) -> Any:
            sent.append(tensor.nbytes)
            return super().send(tensor, to, tag)

    summed(links(2, Counted), tree, [[0, 1], [2, 3]], "int8")
    assert sent == [BucketCodec(codec("int8"), SHAPES).num_bytes] * 2
    assert sent[0] < 0.27 * 4 * SIZE
