"""Ray nodes that are part of the cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from share_compute.errors import ContributorLost


def living(nodes: Iterable[str]) -> list[str]:
    """Return those nodes that are part of the cluster now."""
    known = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return [node for node in nodes if node in known]


def alive(nodes: Sequence[str]) -> list[str]:
    """Return those nodes that are part of the cluster now.

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
