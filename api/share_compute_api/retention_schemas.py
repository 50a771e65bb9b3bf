"""What the REST API says of deletion."""

from __future__ import annotations

from typing import Literal

from share_compute_api.schemas import View


class Deleted(View):
    """What was deleted."""

    id: str
    is_deleted: bool
    """False while a job that was asked to stop has not."""


class Pruned(View):
    """Something that is older than it is to be kept."""

    kind: Literal["job", "artifact", "checkpoints", "metrics", "events"]
    job_id: str | None
    """The job that it belongs to; null for events, which are counted together."""
    name: str | None
    """Of the job, or of the artifact."""
    rows: int
    """In the database."""
    size_bytes: int
    """Of its files."""


class PruneReport(View):
    """What pruning deleted, or would delete."""

    dry_run: bool
    pruned: tuple[Pruned, ...]
    size_bytes: int
    """Of all files together."""
