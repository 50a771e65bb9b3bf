"""The sum is the same in any order of arrival, whichever members computed its parts."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from share_compute.protocol.tree import Node, SummationTree

trees = st.lists(st.integers(1, 5), min_size=1, max_size=6).map(lambda runs: SummationTree(tuple(runs)))
Held = dict[Node, str]


def expression(tree: SummationTree, node: Node) -> str:
    """Return the expected sum."""
    children = tree.children(node)
    if children is None:
        return str(node.start)
    return f"({expression(tree, children[0])}+{expression(tree, children[1])})"


def take(tree: SummationTree, held: Held, new: Node, value: str) -> None:
    held[new] = value
    for left, right, parent in tree.merges(tuple(held), new):
        held[parent] = f"({held.pop(left)}+{held.pop(right)})"


@given(trees, st.data())
def test_any_order_at_any_members_gives_the_root_expression(tree: SummationTree, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(tree.microbatches)))
    owners = data.draw(st.lists(st.integers(0, 2), min_size=len(order), max_size=len(order)))
    members: list[Held] = [{}, {}, {}]
    for microbatch in order:
        take(tree, members[owners[microbatch]], Node(microbatch, microbatch + 1), str(microbatch))
    for member, held in enumerate(members):
        ids = [microbatch for microbatch in order if owners[microbatch] == member]
        assert tuple(sorted(held)) == tree.cover(ids)
        assert len(held) <= tree.buffers(ids)
    whole: Held = {}
    for node, value in data.draw(st.permutations([item for held in members for item in held.items()])):
        take(tree, whole, node, value)
    assert whole == {tree.root: expression(tree, tree.root)}


@given(trees, st.data())
def test_sums_of_runs_may_be_kept_apart(tree: SummationTree, data: st.DataObject) -> None:
    apart = SummationTree(tree.runs, keeps_runs_apart=True)
    order = data.draw(st.permutations(range(tree.microbatches)))
    held: Held = {}
    for number, microbatch in enumerate(order, start=1):
        before = apart.grows(microbatch)
        assert before is None or any(
            run.start <= before.start < microbatch < run.stop for run in apart.sums_of_runs
        )
        take(apart, held, Node(microbatch, microbatch + 1), str(microbatch))
        assert tuple(sorted(held)) == apart.cover(order[:number])
        assert len(held) <= apart.buffers(order[:number])
    assert held == {run: expression(tree, run) for run in apart.sums_of_runs}
    assert apart.sums_of_runs == tree.sums_of_runs
    assert expression(apart, apart.root) == expression(tree, tree.root)


@given(trees)
def test_every_node_but_the_root_has_a_parent_of_two_summands(tree: SummationTree) -> None:
    waiting, singles = [tree.root], []
    assert tree.parent(tree.root) is None
    while waiting:
        node = waiting.pop()
        children = tree.children(node)
        if children is None:
            singles.append(node)
            continue
        left, right = children
        assert (left.start, left.stop, right.stop) == (node.start, right.start, node.stop)
        assert tree.parent(left) == tree.parent(right) == node
        waiting += children
    assert sorted(singles) == [Node(each, each + 1) for each in range(tree.microbatches)]


@given(trees)
def test_a_run_in_order_takes_one_buffer(tree: SummationTree) -> None:
    for start, stop in pairwise([0, *accumulate(tree.runs)]):
        assert tree.buffers(range(start, stop)) == 1
        assert tree.cover(range(start, stop)) == (Node(start, stop),)


@given(trees)
def test_a_microbatch_grows_what_precedes_it(tree: SummationTree) -> None:
    for microbatch in range(tree.microbatches):
        before = tree.grows(microbatch)
        if before is not None:
            assert tree.parent(before) == Node(before.start, microbatch + 1)


def test_runs_are_added_in_a_balanced_tree() -> None:
    tree = SummationTree((2, 3, 1, 2))
    assert expression(tree, tree.root) == "(((0+1)+((2+3)+4))+(5+(6+7)))"


def test_what_was_computed_out_of_order_waits_in_its_own_buffer() -> None:
    tree = SummationTree((4,))
    assert tree.buffers([0, 1, 2, 3]) == 1
    assert tree.buffers([3, 2, 1, 0]) == 4
    assert tree.cover([1, 2, 3]) == (Node(1, 2), Node(2, 3), Node(3, 4))


@pytest.mark.parametrize("runs", [(), (0,), (2, 0)])
def test_runs_without_microbatches_are_refused(runs: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="runs"):
        SummationTree(runs)
