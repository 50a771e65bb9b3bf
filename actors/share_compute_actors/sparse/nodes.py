"""Ray nodes that are part of the cluster."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from share_compute.errors import ContributorLost

KEPT_S = 1.0
"""Time for which `LivingNodes` keeps an answer."""


def living(nodes: Iterable[str]) -> list[str]:
    """Return the given nodes that are part of the cluster now."""
    known = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return [node for node in nodes if node in known]


class LivingNodes:
    """Finds nodes that are part of the cluster.

    Ray is asked once a second at most, because each answer lists all nodes.

    Args:
        nodes: the nodes of interest.
    """

    def __init__(self, nodes: Iterable[str]) -> None:
        self._nodes = list(nodes)
        self._known: list[str] = []
        self._asked_at = float("-inf")

    def now(self, *, afresh: bool = False) -> list[str]:
        """Return those nodes that are part of the cluster, or were part of it a second ago.

        Args:
            afresh: whether to ask Ray even if the last answer is recent.
        """
        if afresh or time.monotonic() - self._asked_at >= KEPT_S:
            self._known, self._asked_at = living(self._nodes), time.monotonic()
        return self._known


def alive(nodes: Sequence[str]) -> list[str]:
    """Return the nodes that are part of the cluster now.

    Raises:
        ContributorLost: there is none.
    """
    found = living(nodes)
    if not found:
        raise ContributorLost("none of the job's machines is left", hint="give the job more machines")
    return found


def on_node(node: str) -> NodeAffinitySchedulingStrategy:
    """Return the strategy that places an actor on a node, and nowhere else."""
    return NodeAffinitySchedulingStrategy(node, soft=False)
