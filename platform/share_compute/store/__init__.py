"""Persistent state of the server: in SQLite by default, or in PostgreSQL if its URL is given."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from share_compute.store.records import (
    AgentRecord,
    ApiKeyRecord,
    ArtifactRecord,
    ContributorRecord,
    DeploymentRecord,
    EventRecord,
    InviteRecord,
    InviteState,
    JobRecord,
    LinkRecord,
    LinkState,
    MetricRecord,
    PresenceRecord,
    QueuedJob,
    RungRecord,
    SweepProgress,
    TrialJobRecord,
    TrialRecord,
)

if TYPE_CHECKING:
    from share_compute.store.database.database import upgrade
    from share_compute.store.store import Store
    from share_compute.store.streams import StreamRecord

__all__ = [
    "AgentRecord",
    "ApiKeyRecord",
    "ArtifactRecord",
    "ContributorRecord",
    "DeploymentRecord",
    "EventRecord",
    "InviteRecord",
    "InviteState",
    "JobRecord",
    "LinkRecord",
    "LinkState",
    "MetricRecord",
    "PresenceRecord",
    "QueuedJob",
    "RungRecord",
    "Store",
    "StreamRecord",
    "SweepProgress",
    "TrialJobRecord",
    "TrialRecord",
    "upgrade",
]

_HEAVY = {
    "Store": "share_compute.store.store",
    "StreamRecord": "share_compute.store.streams",
    "upgrade": "share_compute.store.database.database",
}


def __getattr__(name: str) -> Any:
    """Import a name of `_HEAVY` on first use, so that processes that need only the records do not load SQLAlchemy."""
    if name in _HEAVY:
        return getattr(import_module(_HEAVY[name]), name)
    raise AttributeError(name)
