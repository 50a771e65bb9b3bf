"""Checks a contributor's claim to a Ray node: the node's label, address and resources."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from share_compute.device_kinds import KINDS
from share_compute.errors import Conflict, ContributorLost
from share_compute.quantities import bytes_text
from share_compute.store import ContributorRecord
from share_compute_api.cluster.calls import NodeFacts
from share_compute_api.control import LABEL

_HINT = "end the machine's agent, and let it join again with a new invite"


def check_node(
    contributor: ContributorRecord,
    node_id: str,
    address: str,
    nodes: Sequence[NodeFacts],
    *,
    head_node_id: str,
) -> bool:
    """Check that a node belongs to the contributor and has the resources that the contributor lends.

    Args:
        contributor: the contributor as it joined; its limits are the resources that it lends.
        node_id: id of the claimed node, in hexadecimal.
        address: the claimed IP address.
        nodes: Ray's facts about all nodes.
        head_node_id: id of the head's node.

    Returns:
        Whether the head lists the node as alive. If not, the node may still be starting.

    Raises:
        Conflict: the node is the head's or another contributor's, its address is not the claimed one, or it has fewer
            resources than the contributor lends.
    """
    found = next((node for node in nodes if node.node_id == node_id), None)
    if node_id == head_node_id or (found is not None and found.labels.get(LABEL) != contributor.id):
        raise _refused(contributor, f"node {node_id[:12]} is not the one of this contributor")
    if found is None or not found.is_alive:
        return False
    if _plain(found.address) != _plain(address):
        raise _refused(contributor, f"its node has the address {found.address}, not {address}")
    memory_bytes = int(contributor.limits.get("memory_bytes") or 0)
    if memory_bytes > found.resources.get("memory", 0):
        has = bytes_text(int(found.resources.get("memory", 0)))
        raise _refused(contributor, f"it lends {bytes_text(memory_bytes)} of memory, but its node has {has}")
    cpu_threads = int(contributor.limits.get("cpu_threads") or 0)
    cpus = found.resources.get("CPU", 0)
    if cpu_threads > cpus:
        raise _refused(contributor, f"it lends {cpu_threads} threads, but its node has {cpus:.0f}")
    gpus = int(found.resources.get("GPU", 0))
    if KINDS[contributor.lent_kind].is_gpu and not gpus:
        raise _refused(contributor, "it lends a GPU, but its node has none")
    if KINDS[contributor.lent_kind].is_gpu and gpus < contributor.lent_devices:
        raise _refused(contributor, f"it lends {contributor.lent_devices} GPUs, but its node has {gpus}")
    return True


def unknown_node(contributor: ContributorRecord, node_id: str) -> ContributorLost:
    """Return the error for a node that the head does not list as alive; the node may belong to an earlier head."""
    return ContributorLost(
        f"the head knows no live node {node_id[:12]} of contributor {contributor.name}",
        hint="its agent starts the node again",
        machine=contributor.name,
    )


def _refused(contributor: ContributorRecord, problem: str) -> Conflict:
    return Conflict(
        f"contributor {contributor.name} cannot come online: {problem}", hint=_HINT, machine=contributor.name
    )


def _plain(address: str) -> str:
    try:
        return ip_address(address).compressed
    except ValueError:
        return address
