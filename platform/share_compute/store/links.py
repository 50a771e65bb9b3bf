"""Changes of the links of a training job, in the transaction of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, and_, or_
from sqlalchemy.orm import Session

from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.states import JobState
from share_compute.specification import LinkName
from share_compute.store.database.tables import DeploymentRow, JobRow
from share_compute.store.events import add_event
from share_compute.store.records import LinkRecord, LinkState

_WAITS = "it starts when the job has succeeded"
_STARTS = "the job has succeeded; the link is checked, then it starts"
_AGAIN = "it is started again"
_CANCELLED = "it was cancelled after the job had succeeded"


def first_links(names: Sequence[LinkName]) -> list[dict[str, Any]]:
    """Return the links of a new job in the form of its row."""
    return [_data(LinkRecord(name=name, state=LinkState.waiting, reason=_WAITS)) for name in names]


def links_of(row: JobRow) -> list[LinkRecord]:
    """Return the links of a job."""
    return [LinkRecord.model_validate(link) for link in row.links]


def needs_files() -> ColumnElement[bool]:
    """Return the condition for jobs that need the files in their specification: unfinished ones, or with due links."""
    final = [state.value for state in JobState if state.is_final]
    has_due = and_(JobRow.state == JobState.succeeded.value, JobRow.has_waiting_links)
    return or_(JobRow.state.not_in(final), has_due)


def move_links(row: JobRow, state: JobState) -> None:
    """Change the links of a job that goes to another state.

    Links are cancelled with the job, also if it succeeds after it was asked to stop. They wait again if the job is
    resumed.
    """
    if not row.links:
        return
    was_stopped = row.cancel_requested_at is not None or row.delete_requested_at is not None
    links = []
    for link in links_of(row):
        is_open = link.state in (LinkState.waiting, LinkState.cancelled)
        if is_open and state is JobState.cancelled:
            changed = {"state": LinkState.cancelled, "reason": "the job was cancelled"}
        elif is_open and state is JobState.failed:
            changed = {
                "state": LinkState.waiting,
                "reason": "the job failed; it starts if the job is resumed",
            }
        elif is_open and state is JobState.succeeded and was_stopped:
            changed = {
                "state": LinkState.cancelled,
                "reason": "the job was asked to stop before it succeeded",
            }
        elif is_open:
            reason = _STARTS if state is JobState.succeeded else _WAITS
            changed = {"state": LinkState.waiting, "reason": reason}
        else:
            changed = {}
        links.append(link.model_copy(update=changed))
    _write(row, links)


def restart_links(session: Session, row: JobRow, now: datetime) -> bool:
    """Let the failed and cancelled links of a job that has succeeded wait again; return whether there are any.

    If the link ``generate`` is one of them, ``serve`` waits again too, unless its deployment is still live.
    """
    links = links_of(row)
    found = [link for link in links if link.state in (LinkState.failed, LinkState.cancelled)]
    if any(link.name == "generate" for link in found):
        found += [link for link in links if link.name == "serve" and _is_over(session, link)]
    return _replace(session, row, found, LinkState.waiting, _AGAIN, now)


def cancel_links(session: Session, row: JobRow, now: datetime) -> bool:
    """Cancel the waiting links of a job that has succeeded; return whether there are any."""
    found = [link for link in links_of(row) if link.state is LinkState.waiting]
    return _replace(session, row, found, LinkState.cancelled, _CANCELLED, now)


def _replace(
    session: Session, row: JobRow, links: Sequence[LinkRecord], state: LinkState, reason: str, now: datetime
) -> bool:
    """Set the state and the reason of links; return whether there are any."""
    for link in links:
        change_link(session, row, LinkRecord(name=link.name, state=state, reason=reason), now)
    return bool(links)


def _is_over(session: Session, link: LinkRecord) -> bool:
    """Return whether a link started a deployment that is no longer live."""
    if link.started is None:
        return False
    deployment = session.get(DeploymentRow, link.started)
    return deployment is None or DeploymentState(deployment.state).is_final


def change_link(session: Session, row: JobRow, changed: LinkRecord, now: datetime) -> None:
    """Replace the link of the same name, and write the event."""
    _write(row, [changed if link.name == changed.name else link for link in links_of(row)])
    data = changed.model_dump(mode="json", exclude={"name"}, exclude_none=True)
    add_event(session, "link", now, {"link": changed.name, **data}, job=(row.id, row.attempt))


def _write(row: JobRow, links: Sequence[LinkRecord]) -> None:
    row.links = [_data(link) for link in links]
    row.has_waiting_links = any(link.state is LinkState.waiting for link in links)


def _data(link: LinkRecord) -> dict[str, Any]:
    return link.model_dump(mode="json")
