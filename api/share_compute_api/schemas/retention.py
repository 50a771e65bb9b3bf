"""Answers of the REST API to deletions."""

from __future__ import annotations

from typing import Literal

from share_compute_api.schemas.bodies import ResponseBody


class Deleted(ResponseBody):
    """Answer to a deletion."""

    id: str
    is_deleted: bool
    """Whether the deletion is done; false while a job that was asked to stop is still running."""


class Pruned(ResponseBody):
    """Item past its retention time, which pruning deleted or, in a dry run, would delete."""

    kind: Literal["job", "artifact", "checkpoints", "metrics", "events"]
    job_id: str | None
    """Id of the item's job; null for events, which are reported together as one item."""
    name: str | None
    """Name of the job or artifact; null for events."""
    rows: int
    """Number of rows in the database."""
    size_bytes: int
    """Size of the files."""


class PruneReport(ResponseBody):
    """Items that pruning deleted, or would delete in a dry run."""

    dry_run: bool
    pruned: tuple[Pruned, ...]
    size_bytes: int
    """Size of all files together."""
    keep: dict[str, float]
    """Retention times that are set, in days: name of the setting -> days, such as ``keep_jobs_days``."""
