"""Deletes rows whose retention time is over, and records the folders of their files for removal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal, TypeAlias

from sqlalchemy import ColumnElement, delete, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from share_compute.lifecycle.deployment_states import LIVE
from share_compute.lifecycle.folders import job_folder
from share_compute.lifecycle.states import JobState
from share_compute.store.database.database import Database
from share_compute.store.database.tables import ArtifactRow, DeploymentRow, EventRow, JobRow, MetricRow
from share_compute.store.deletion import (
    FINAL_JOBS,
    delete_artifact,
    delete_job,
    remove_folder,
    user_of,
)
from share_compute.store.events import DEPLOYMENT
from share_compute.store.work import changes_work

PrunedKind: TypeAlias = Literal["job", "artifact", "checkpoints", "metrics", "events"]
ROWS_AT_ONCE = 20_000
"""Maximum number of metrics or events deleted in one transaction, because other write transactions wait meanwhile."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Retention times in days, after the end of the job or, for events, after the event; None keeps items forever."""

    jobs_days: float | None = None
    artifacts_days: float | None = None
    checkpoints_days: float | None = None
    metrics_days: float | None = None
    events_days: float | None = None


@dataclass(frozen=True, slots=True)
class Prunable:
    """An item that `Retention.prune` deletes, because its retention time is over."""

    kind: PrunedKind
    job_id: str | None = None
    """Id of the item's job; None for events."""
    name: str | None = None
    """Name of the job or of the artifact; None for events."""
    rows: int = 0
    folder: Path | None = None
    """Folder of the item's files; None for metrics and events."""


class Retention:
    """Finds and deletes items whose retention time has passed.

    Args:
        database: the database with the rows.
        clock: function that returns the current time in UTC.
    """

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._clock = clock

    def find(self, keep: Keep, data_folder: Path) -> list[Prunable]:
        """Return the items that `prune` would delete, without deleting them.

        Args:
            keep: retention times.
            data_folder: the server's data folder.
        """
        now = self._clock()
        with self._database.read() as session:
            return list(_find(session, keep, now, data_folder))

    def prune(self, keep: Keep, data_folder: Path) -> list[Prunable]:
        """Delete the items whose retention time is over; return the deleted items."""
        now = self._clock()
        return [one for one in self.find(keep, data_folder) if self._delete(one, keep, now, data_folder)]

    def _delete(self, one: Prunable, keep: Keep, now: datetime, data_folder: Path) -> bool:
        """Delete one item and return True; return False if its job was resumed meanwhile or its files are in use.

        For metrics and events, the result is always True.
        """
        if one.kind == "events":
            self._delete_rows(
                EventRow, EventRow.seq, _old_events(now - timedelta(days=keep.events_days or 0))
            )
            return True
        if one.kind == "metrics":
            ended = MetricRow.job_id.in_(
                select(JobRow.id).where(JobRow.id == one.job_id, JobRow.state.in_(FINAL_JOBS))
            )
            self._delete_rows(MetricRow, MetricRow.step, [ended])
            return True
        with self._database.write() as session:
            job = session.get(JobRow, one.job_id)
            if job is None or not JobState(job.state).is_final or user_of(session, job.id):
                return False
            if one.kind == "job":
                delete_job(session, job, data_folder, now)
            elif one.kind == "artifact":
                wanted = (ArtifactRow.job_id == job.id, ArtifactRow.name == one.name)
                artifact = session.scalar(select(ArtifactRow).where(*wanted))
                if artifact is None:
                    return False
                delete_artifact(session, artifact, now)
            else:
                assert one.folder is not None
                job.checkpoint_path = job.checkpoint_step = None
                remove_folder(session, one.folder, now)
        return True

    def _delete_rows(
        self,
        table: type[EventRow | MetricRow],
        number: InstrumentedAttribute[int],
        wanted: Sequence[ColumnElement[bool]],
    ) -> None:
        """Delete rows in chunks, in ascending order of the column ``number``, so that no transaction takes long."""
        while True:
            beyond = select(number).where(*wanted).order_by(number).offset(ROWS_AT_ONCE).limit(1)
            with self._database.write() as session:
                last = session.scalar(beyond)
                piece = wanted if last is None else [*wanted, number < last]
                session.execute(delete(table).where(*piece))
            if last is None:
                return


def _find(session: Session, keep: Keep, now: datetime, data_folder: Path) -> Iterator[Prunable]:
    jobs = _over(session, keep.jobs_days, now)
    going = {job.id for job in jobs}
    for job in jobs:
        folder = job_folder(data_folder, job.kind, job.id)
        yield Prunable("job", job.id, job.name, _rows(session, job.id), folder)
    for job in _over(session, keep.artifacts_days, now, going):
        for artifact in session.scalars(select(ArtifactRow).where(ArtifactRow.job_id == job.id)):
            yield Prunable("artifact", job.id, artifact.name, 1, Path(artifact.path))
    for job in _over(session, keep.checkpoints_days, now, going):
        checkpoints = job_folder(data_folder, job.kind, job.id) / "checkpoints"
        if checkpoints.is_dir():
            yield Prunable("checkpoints", job.id, job.name, 0, checkpoints)
    for job in _over(session, keep.metrics_days, now, going):
        if rows := _count(session, MetricRow, [MetricRow.job_id == job.id]):
            yield Prunable("metrics", job.id, job.name, rows)
    if keep.events_days is not None:
        old = _old_events(now - timedelta(days=keep.events_days))
        others = or_(EventRow.job_id.is_(None), EventRow.job_id.not_in(going))
        if rows := _count(session, EventRow, [*old, others]):
            yield Prunable("events", rows=rows)


def _over(session: Session, days: float | None, now: datetime, but: Collection[str] = ()) -> Sequence[JobRow]:
    """Return the jobs that ended more than ``days`` ago and have no user (`user_of`); none if ``days`` is None."""
    if days is None:
        return []
    over = (
        JobRow.state.in_(FINAL_JOBS),
        JobRow.finished_at < now - timedelta(days=days),
        JobRow.id.not_in(but),
    )
    found = session.scalars(select(JobRow).where(*over).order_by(JobRow.finished_at, JobRow.id))
    return [job for job in found if user_of(session, job.id) is None]


def _count(
    session: Session, table: type[EventRow | MetricRow | ArtifactRow], wanted: Sequence[ColumnElement[bool]]
) -> int:
    return session.scalar(select(func.count()).select_from(table).where(*wanted)) or 0


def _rows(session: Session, job_id: str) -> int:
    """Return the number of rows that a job has in all tables."""
    return 1 + sum(
        _count(session, table, [table.job_id == job_id]) for table in (EventRow, MetricRow, ArtifactRow)
    )


def _old_events(before: datetime) -> list[ColumnElement[bool]]:
    """Return the conditions for events earlier than ``before`` that can be deleted.

    Events of unfinished jobs and of live deployments are kept. For each machine, the last event that changed its work
    is kept too.
    """
    is_over = or_(
        EventRow.job_id.is_(None), EventRow.job_id.in_(select(JobRow.id).where(JobRow.state.in_(FINAL_JOBS)))
    )
    last = (
        select(func.max(EventRow.seq))
        .where(EventRow.contributor_id.is_not(None), changes_work())
        .group_by(EventRow.contributor_id)
    )
    live = select(DeploymentRow.id).where(DeploymentRow.state.in_([state.value for state in LIVE]))
    is_down = or_(EventRow.kind != DEPLOYMENT, EventRow.data["id"].as_string().not_in(live))
    return [EventRow.at < before, is_over, EventRow.seq.not_in(last), is_down]
