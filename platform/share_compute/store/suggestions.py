"""Suggestions for unknown ids and names of jobs and deployments, from the newest rows."""

from __future__ import annotations

from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from share_compute.files.strict import suggestion
from share_compute.store.database.tables import DeploymentRow, JobRow

_MOST_COMPARED: Final = 500
_SIMILAR_ID: Final = 0.8
"""Similarity from which an id is suggested. Random ids of one kind have 0.3 to 0.6."""


def suggested_job(session: Session, name_or_id: str) -> str:
    """Return a suggestion for an unknown job: the newest job with this name, or one with a similar id or name."""
    newest = select(JobRow.id, JobRow.name).order_by(JobRow.created_at.desc()).limit(_MOST_COMPARED)
    ids: dict[str, str] = {}
    for job_id, name in session.execute(newest):
        ids.setdefault(name, job_id)
        ids[job_id] = job_id
    if name_or_id in ids:
        return f"; did you mean {ids[name_or_id]!r}, whose name is {name_or_id}?"
    return suggestion(name_or_id, [*ids], _SIMILAR_ID)


def suggested_deployment(session: Session, name: str) -> str:
    """Return a suggestion for an unknown deployment: one with a similar name."""
    newest = select(DeploymentRow.name).order_by(DeploymentRow.created_at.desc()).limit(_MOST_COMPARED)
    return suggestion(name, [*dict.fromkeys(session.scalars(newest))])
