"""What the server remembers: SQLite by default, PostgreSQL by URL; every change of state is a row first."""

from share_compute.store.database import upgrade
from share_compute.store.records import (
    ApiKeyRecord,
    ArtifactRecord,
    ContributorRecord,
    EventRecord,
    InviteRecord,
    InviteState,
    JobRecord,
    MetricRecord,
)
from share_compute.store.store import Store

__all__ = [
    "ApiKeyRecord",
    "ArtifactRecord",
    "ContributorRecord",
    "EventRecord",
    "InviteRecord",
    "InviteState",
    "JobRecord",
    "MetricRecord",
    "Store",
    "upgrade",
]
