"""The parameters with which the control plane starts the server of a deployment."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from share_compute.files.strict import StrictModel
from share_compute.lifecycle.computation import Computation
from share_compute.models.huggingface.encoder_types import Pooling
from share_compute.specification import ServeJob
from share_compute.topology import Topology


class ServingAssignment(StrictModel):
    """Parameters of a server that serves one replica of a deployment."""

    deployment_id: str
    replica: int = 0
    spec: ServeJob
    folder: Path
    """Folder of the model, on the server's host."""
    window_tokens: int = Field(ge=2)
    """Longest sequence, prompt and answer together, in tokens."""
    pooling: Pooling | None = None
    """Pooling of an encoder's token vectors; None if the model generates text."""
    topology: Topology
    """The contributors that the replica may use."""
    computation: Computation | None = None
    """The deployment's choice between compiled and eager code; None before the choice, or without ``compile``."""
    is_standby: bool = False
    """Whether the server only keeps the members that an earlier server left, until the server is resumed."""

    @property
    def replica_id(self) -> str:
        """Id of the replica, unique in the cluster."""
        return f"{self.deployment_id}/{self.replica}"
