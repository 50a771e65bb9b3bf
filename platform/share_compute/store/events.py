"""The log of all events, in the order in which they were committed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import func, insert, select
from sqlalchemy.orm import Session

from share_compute.store.database.database import HAS_EVENTS, Database
from share_compute.store.database.tables import EventRow
from share_compute.store.records import EventRecord

DEPLOYMENT = "deployment"
"""Kind of the events of deployments."""


class Events:
    """The table of events. Each row is written in the transaction of the change that it reports, or by `record`."""

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._clock = clock

    def record(self, kind: str, data: dict[str, Any]) -> None:
        """Write an event in its own transaction."""
        with self._database.write() as session:
            add_event(session, kind, self._clock(), data)

    def after(
        self,
        seq: int,
        *,
        job_id: str | None = None,
        deployment_id: str | None = None,
        contributor_id: str | None = None,
        without: Collection[str] = (),
        limit: int = 500,
    ) -> list[EventRecord]:
        """Return at most ``limit`` events with numbers above ``seq``, oldest first.

        Each given id restricts the result to events of that job, deployment or contributor. Events of the kinds in
        ``without`` are left out.
        """
        query = select(EventRow).where(EventRow.seq > seq).order_by(EventRow.seq).limit(limit)
        if job_id is not None:
            query = query.where(EventRow.job_id == job_id)
        if deployment_id is not None:
            # Deployment events have no job, so this condition lets the query use the index on (job_id, seq).
            of_it = EventRow.data["id"].as_string() == deployment_id
            query = query.where(EventRow.job_id.is_(None), EventRow.kind == DEPLOYMENT, of_it)
        if contributor_id is not None:
            query = query.where(EventRow.contributor_id == contributor_id)
        if without:
            query = query.where(EventRow.kind.not_in(without))
        with self._database.read() as session:
            return [EventRecord.model_validate(row) for row in session.scalars(query)]

    def last(self, job_id: str, kind: str, limit: int) -> list[EventRecord]:
        """Return at most ``limit`` newest events of one kind of a job, oldest first."""
        query = (
            select(EventRow)
            .where(EventRow.job_id == job_id, EventRow.kind == kind)
            .order_by(EventRow.seq.desc())
            .limit(limit)
        )
        with self._database.read() as session:
            return [EventRecord.model_validate(row) for row in session.scalars(query)][::-1]

    def last_seq(self) -> int:
        """Return the number of the newest event; 0 if there is none."""
        with self._database.read() as session:
            return session.scalar(select(func.max(EventRow.seq))) or 0


def add_event(
    session: Session,
    kind: str,
    at: datetime,
    data: dict[str, Any],
    *,
    job: tuple[str, int] | None = None,
    contributor_id: str | None = None,
) -> None:
    """Write one event in the transaction of the change that it reports; ``job`` is the job's id and attempt."""
    job_id, attempt = job or (None, None)
    session.add(
        EventRow(kind=kind, at=at, data=data, job_id=job_id, attempt=attempt, contributor_id=contributor_id)
    )
    # Flush each event separately, so that event numbers follow the order of the calls.
    session.flush()
    session.info[HAS_EVENTS] = True


def add_job_events(
    session: Session, job: tuple[str, int], at: datetime, rows: Sequence[tuple[str, dict[str, Any]]]
) -> None:
    """Write several events of one attempt, given as (kind, data), in order."""
    job_id, attempt = job
    if rows:
        common = {"at": at, "job_id": job_id, "attempt": attempt}
        session.execute(insert(EventRow), [{"kind": kind, "data": data, **common} for kind, data in rows])
        session.info[HAS_EVENTS] = True
