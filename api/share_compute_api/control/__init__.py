"""Supervises contributors, jobs, batches and deployments."""

from __future__ import annotations

from share_compute.lifecycle.states import ContributorState

LABEL = "share-compute-contributor"
"""Key of the Ray node label whose value is the id of the contributor that runs the node."""
AWAY = "the server was restarted; waiting for the machine to come back"
"""Reason shown for a contributor that is lost because its agent has not reconnected since the server's restart."""
ARRIVING = (ContributorState.joining, ContributorState.probing)
"""States of machines that are about to be ready."""
