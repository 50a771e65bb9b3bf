"""What the control plane tells the server of a deployment when it starts it."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from share_compute.models.encoders import Pooling
from share_compute.specification import ServeJob
from share_compute.strict import StrictModel
from share_compute.topology import Topology


class ServingAssignment(StrictModel):
    """All that a server needs to serve one replica of a deployment."""

    deployment_id: str
    replica: int = 0
    spec: ServeJob
    folder: Path
    """Of the model, on the head."""
    window_tokens: int = Field(ge=2)
    """Longest sequence, prompt and answer together."""
    pooling: Pooling | None = None
    """How an encoder's vectors are made; None where the model writes text."""
    topology: Topology
    """The contributors that it may use."""

    @property
    def replica_id(self) -> str:
        """Unique in the cluster."""
        return f"{self.deployment_id}/{self.replica}"
