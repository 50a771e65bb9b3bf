"""Answers of the REST API about deletion."""

from __future__ import annotations

from typing import Literal

from share_compute_api.schemas.bodies import View


class Deleted(View):
    """Answer to a deletion."""

    id: str
    is_deleted: bool
    """False while a job that was asked to stop still runs."""


class Pruned(View):
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


class PruneReport(View):
    """Everything that pruning deleted, or would delete."""

    dry_run: bool
    pruned: tuple[Pruned, ...]
    size_bytes: int
    """Size of all files together."""
