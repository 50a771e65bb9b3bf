"""Suggestions for unknown ids and names, from the newest rows."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import InstrumentedAttribute, Session

from share_compute.files.strict import suggestion
from share_compute.store.database.tables import ApiKeyRow, ContributorRow, DeploymentRow, InviteRow, JobRow

_MOST_COMPARED: Final = 500
_SIMILAR_ID: Final = 0.8
"""Similarity from which an id is suggested. Random ids of one kind have 0.3 to 0.6."""


def suggested_job(session: Session, name_or_id: str) -> str:
    """Return a suggestion for an unknown job: the newest job with this name, or one with a similar id or name."""
    return _suggested_row(session, JobRow.id, JobRow.name, JobRow.created_at, name_or_id)


def suggested_machine(session: Session, name_or_id: str) -> str:
    """Return a suggestion for an unknown machine, like `suggested_job`."""
    return _suggested_row(
        session, ContributorRow.id, ContributorRow.name, ContributorRow.joined_at, name_or_id
    )


def suggested_invite(session: Session, label_or_id: str) -> str:
    """Return a suggestion for an unknown invite, like `suggested_job`."""
    return _suggested_row(session, InviteRow.id, InviteRow.label, InviteRow.created_at, label_or_id)


def suggested_key(session: Session, name_or_id: str) -> str:
    """Return a suggestion for an unknown API key, like `suggested_job`."""
    return _suggested_row(session, ApiKeyRow.id, ApiKeyRow.name, ApiKeyRow.created_at, name_or_id)


def _suggested_row(
    session: Session,
    key: InstrumentedAttribute[str],
    name: InstrumentedAttribute[Any],
    made_at: InstrumentedAttribute[datetime],
    name_or_id: str,
) -> str:
    newest = select(key, name).order_by(made_at.desc()).limit(_MOST_COMPARED)
    return suggested_id(name_or_id, ((row[0], row[1]) for row in session.execute(newest)))


def suggested_id(name_or_id: str, newest: Iterable[tuple[str, str | None]]) -> str:
    """Return a suggestion for an unknown id: the newest with this name, or one with a similar id or name.

    Args:
        name_or_id: the unknown id.
        newest: known ids with their names, newest first.
    """
    ids: dict[str, str] = {}
    for known_id, name in newest:
        ids.setdefault(name or known_id, known_id)
        ids[known_id] = known_id
    if name_or_id in ids:
        return f"; did you mean {ids[name_or_id]!r}, whose name is {name_or_id}?"
    return suggestion(name_or_id, [*ids], _SIMILAR_ID)


def suggested_deployment(session: Session, name: str) -> str:
    """Return a suggestion for an unknown deployment: one with a similar name."""
    newest = select(DeploymentRow.name).order_by(DeploymentRow.created_at.desc()).limit(_MOST_COMPARED)
    return suggestion(name, [*dict.fromkeys(session.scalars(newest))])
