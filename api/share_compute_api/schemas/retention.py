"""Answers of the REST API about deletion."""

from __future__ import annotations

from typing import Literal

from share_compute_api.schemas.bodies import ResponseBody


class Deleted(ResponseBody):
    """Answer to a deletion."""

    id: str
    is_deleted: bool
    """False while a job that was asked to stop still runs."""


class Pruned(ResponseBody):
    """Record or files past their retention time."""

    kind: Literal["job", "artifact", "checkpoints", "metrics", "events"]
    job_id: str | None
    """Id of the job; null for events, which are counted together."""
    name: str | None
    """Name of the job, or of the artifact."""
    rows: int
    """Number of rows in the database."""
    size_bytes: int
    """Size of the files."""


class PruneReport(ResponseBody):
    """Everything that pruning deleted, or would delete."""

    dry_run: bool
    pruned: tuple[Pruned, ...]
    size_bytes: int
    """Size of all files together."""
