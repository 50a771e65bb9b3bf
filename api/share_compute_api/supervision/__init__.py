"""Supervision: watches contributors, runs queued jobs and batches, and serves deployments."""

from __future__ import annotations

from dataclasses import dataclass, field

LABEL = "share-compute-contributor"
"""Ray label that names the contributor that a node belongs to."""
AWAY = "the server was restarted; waiting for the machine to come back"
"""Reason of a contributor that is lost because the server restarted, until its agent comes back."""


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """The Ray cluster that this process is connected to."""

    ray_address: str
    """host:port of the head, as other machines reach it."""
    token: str = field(repr=False)
    """Secret that nodes authenticate with."""
    head_node_id: str
    """Ray node of the head, in hexadecimal."""
    advertise_address: str
    """IP address that other machines reach this one at."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that joining nodes must be started with."""
