"""The log of all that happened, in the order it was committed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import func, insert, select
from sqlalchemy.orm import Session

from share_compute.store.database import TOLD, Database
from share_compute.store.records import EventRecord
from share_compute.store.tables import Event

DEPLOYMENT = "deployment"
"""Kind of the events that tell of a deployment."""


class Events:
    """The table of events; rows are written by the tables whose change they tell, or by `tell`."""

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._clock = clock

    def tell(self, kind: str, data: dict[str, Any]) -> None:
        """Write an event of the server itself, which is no change of a row."""
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
        """Return the next events after number ``seq``, of one job, deployment or contributor, or of the whole pool.

        Those of the kinds ``without`` are left out.
        """
        query = select(Event).where(Event.seq > seq).order_by(Event.seq).limit(limit)
        if job_id is not None:
            query = query.where(Event.job_id == job_id)
        if deployment_id is not None:
            # No job's: the index then leads past the steps of all jobs, which are nearly all there is.
            of_it = Event.data["id"].as_string() == deployment_id
            query = query.where(Event.job_id.is_(None), Event.kind == DEPLOYMENT, of_it)
        if contributor_id is not None:
            query = query.where(Event.contributor_id == contributor_id)
        if without:
            query = query.where(Event.kind.not_in(without))
        with self._database.read() as session:
            return [EventRecord.model_validate(row) for row in session.scalars(query)]

    def last_seq(self) -> int:
        """Return the number of the newest event, 0 when there is none."""
        with self._database.read() as session:
            return session.scalar(select(func.max(Event.seq))) or 0


def add_event(
    session: Session,
    kind: str,
    at: datetime,
    data: dict[str, Any],
    *,
    job: tuple[str, int] | None = None,
    contributor_id: str | None = None,
) -> None:
    """Write one event in the transaction of the change that it tells; ``job`` is its id and attempt."""
    job_id, attempt = job or (None, None)
    session.add(
        Event(kind=kind, at=at, data=data, job_id=job_id, attempt=attempt, contributor_id=contributor_id)
    )
    # One at a time, so that numbers follow the order of the calls.
    session.flush()
    session.info[TOLD] = True


def add_job_events(
    session: Session, job: tuple[str, int], at: datetime, rows: Sequence[tuple[str, dict[str, Any]]]
) -> None:
    """Write several events of one attempt, as (kind, data), in order."""
    job_id, attempt = job
    if rows:
        common = {"at": at, "job_id": job_id, "attempt": attempt}
        session.execute(insert(Event), [{"kind": kind, "data": data, **common} for kind, data in rows])
        session.info[TOLD] = True
