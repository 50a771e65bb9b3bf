"""Supervision: watches contributors, runs queued jobs and batches, and serves deployments."""

from __future__ import annotations

LABEL = "share-compute-contributor"
"""Ray label that names the contributor that a node belongs to."""
AWAY = "the server was restarted; waiting for the machine to come back"
"""Reason of a contributor that is lost because the server restarted, until its agent comes back."""
