"""The order in which the gradients of a step are added: one expression over microbatch ids, fixed for a whole job.

Floating-point sums depend on their order, so the order must not depend on which member computed a microbatch.
The ids are cut into consecutive runs. Inside a run, gradients are added one after the other. The sums of the runs are
added in a balanced binary tree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple


class Node(NamedTuple):
    """The sum of the gradients of microbatches [start, stop), added in the order of the tree."""

    start: int
    stop: int


@dataclass(frozen=True)
class SummationTree:
    """Binary tree over the microbatches of a step: the order in which one job adds their gradients.

    Args:
        runs: number of consecutive ids in each run.
        keeps_runs_apart: whether members add only the gradients inside a run. The sums of runs are then rounded before
            they are added.

    Raises:
        ValueError: there is no run, or a run has no ids.
    """

    runs: tuple[int, ...]
    keeps_runs_apart: bool = False
    _children: dict[Node, tuple[Node, Node]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _parents: dict[Node, Node] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.runs or min(self.runs) < 1:
            raise ValueError(f"runs of {self.runs} microbatches")
        self._grow([0, *accumulate(self.runs)])
        for node, children in self._children.items():
            for child in children:
                if not (self.keeps_runs_apart and child in self.sums_of_runs):
                    self._parents[child] = node

    def _grow(self, edges: Sequence[int]) -> Node:
        whole = Node(edges[0], edges[-1])
        if len(edges) > 2:
            middle = len(edges) // 2
            self._children[whole] = self._grow(edges[: middle + 1]), self._grow(edges[middle:])
            return whole
        for stop in range(whole.start + 2, whole.stop + 1):
            self._children[Node(whole.start, stop)] = Node(whole.start, stop - 1), Node(stop - 1, stop)
        return whole

    @cached_property
    def sums_of_runs(self) -> tuple[Node, ...]:
        """The sum of each run, in order."""
        return tuple(Node(start, stop) for start, stop in pairwise([0, *accumulate(self.runs)]))

    @property
    def microbatches(self) -> int:
        """Number of microbatches in a step."""
        return sum(self.runs)

    @property
    def root(self) -> Node:
        """The sum over all microbatches of a step."""
        return Node(0, self.microbatches)

    def children(self, node: Node) -> tuple[Node, Node] | None:
        """Return the two summands of a node, left first; None for a single microbatch."""
        return self._children.get(node)

    def parent(self, node: Node) -> Node | None:
        """Return the sum of which a node is a direct summand.

        Return None for the root, and for the sum of a run if `keeps_runs_apart`.
        """
        return self._parents.get(node)

    def grows(self, microbatch: int) -> Node | None:
        """Return the left sibling of a microbatch, to which its gradient is added; None if it has no left sibling."""
        single = Node(microbatch, microbatch + 1)
        parent = self.parent(single)
        if parent is None:
            return None
        left, right = self._children[parent]
        return left if right == single else None

    def merges(self, held: Collection[Node], new: Node) -> Iterator[tuple[Node, Node, Node]]:
        """Yield (left, right, sum) for each addition that ``new`` makes possible, in order of execution."""
        nodes = set(held) | {new}
        while (parent := self.parent(new)) is not None:
            left, right = self._children[parent]
            if left not in nodes or right not in nodes:
                return
            yield left, right, parent
            nodes -= {left, right}
            nodes.add(parent)
            new = parent

    def cover(self, ids: Iterable[int]) -> tuple[Node, ...]:
        """Return the largest nodes that contain only these microbatches, in order.

        These are at most the sums of runs if `keeps_runs_apart`.
        """
        held = set(ids)
        roots = self.sums_of_runs if self.keeps_runs_apart else (self.root,)
        return tuple(node for root in roots for node in self._cover(root, held))

    def _cover(self, node: Node, held: set[int]) -> Iterator[Node]:
        inside = sum(microbatch in held for microbatch in range(node.start, node.stop))
        if inside == node.stop - node.start:
            yield node
        elif inside:
            for child in self._children[node]:
                yield from self._cover(child, held)

    def buffers(self, ids: Sequence[int]) -> int:
        """Return the peak number of full gradients that a member holds while it computes these ids in this order."""
        held: set[Node] = set()
        most = 0
        for microbatch in ids:
            single = Node(microbatch, microbatch + 1)
            prefix = self.grows(microbatch)
            if prefix in held:
                held.discard(prefix)
                single = Node(prefix[0], single.stop)
            most = max(most, len(held) + 1)
            for left, right, parent in self.merges(held, single):
                held -= {left, right}
                held.add(parent)
                single = parent
            held.add(single)
        return most
