"""Adds up the partial sums of several members in the order of a job's summation tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from share_compute.protocol.collectives import merge
from share_compute.protocol.tree import Node, SummationTree
from share_compute_actors.transport.collective.algorithms import Combine


def expression(tree: SummationTree, nodes: Sequence[Node], root: Node | None = None) -> Combine:
    """Return a function that adds up partial sums, one for each of ``nodes``, in the order of ``tree``.

    Args:
        tree: order of the sum.
        nodes: the partial sums.
        root: the sum that they make; None for the sum over all microbatches.

    Raises:
        ValueError: the nodes do not cover all microbatches of the sum exactly once.
    """
    root = root or tree.root
    if len(set(nodes)) < len(nodes):
        raise ValueError(f"held twice: {nodes}")
    additions, kept = merge(tree, nodes)
    if [node for node, _ in kept] != [root]:
        raise ValueError(
            f"{[node for node, _ in kept]} is not the sum of microbatches {root.start} to {root.stop - 1}"
        )

    def combine(values: list[Tensor], out: Tensor) -> None:
        if not additions:
            if out is not values[0]:
                out.copy_(values[0])
            return
        *inner, last = additions
        for left, right in inner:
            values[left].add_(values[right])
        torch.add(values[last[0]], values[last[1]], out=out)

    return combine


def is_one_addition(tree: SummationTree, held: Sequence[Sequence[Node]]) -> bool:
    """Return whether the whole sum is one addition of two members' sums.

    In this case all allreduce algorithms give the same bits.
    """
    sides = [(child,) for child in tree.children(tree.root) or ()]
    return bool(sides) and sorted(tuple(nodes) for nodes in held) == sides
