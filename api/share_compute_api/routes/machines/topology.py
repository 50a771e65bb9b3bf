"""Route for the topology of the ready machines, as a document that the planner accepts."""

from __future__ import annotations

from fastapi import APIRouter

from share_compute.files.topology_file import TopologyDocument, describe_topology
from share_compute.lifecycle.states import ContributorState
from share_compute_api.control.machines.live_topology import live_topology
from share_compute_api.server.auth import READ
from share_compute_api.server.context import InContext

router = APIRouter(prefix="/topology", tags=["plans"])


@router.get("", operation_id="getTopology", dependencies=READ, response_model_exclude_none=True)
def get_topology(context: InContext) -> TopologyDocument:
    """Return the ready machines that were measured, with their speeds and links."""
    return describe_topology(live_topology(context.store.contributors.list([ContributorState.ready])))
