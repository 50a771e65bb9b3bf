"""Deletes the rows of jobs, artifacts and deployments, and records the folders that are to be removed.

A folder is recorded in the transaction that deletes the rows. Its record is deleted after the folder is removed, so a
crash in between leaves no folder behind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from share_compute.errors import Conflict
from share_compute.lifecycle.deployment_states import LIVE, DeploymentState
from share_compute.lifecycle.folders import REPORTS, job_folder
from share_compute.lifecycle.states import JobState
from share_compute.store.database.database import Database
from share_compute.store.database.tables import (
    ArtifactRow,
    DeploymentRow,
    EventRow,
    JobRow,
    MetricRow,
    RemovalRow,
)
from share_compute.store.deployments import deployment_row
from share_compute.store.events import DEPLOYMENT, add_event
from share_compute.store.jobs import ask_to_stop, job_row
from share_compute.store.links import needs_files
from share_compute.store.progress import artifact_row

DELETED = "deleted"
"""Kind of the events that report deletions."""
FINAL_JOBS = [state.value for state in JobState if state.is_final]


class Deletions:
    """Deletes jobs, artifacts and deployments, each in one transaction."""

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._clock = clock

    def job(self, job_id: str, data_folder: Path, *, cancel: bool = False) -> bool:
        """Delete a job with its events, metrics and artifacts, and record its folder for removal.

        Args:
            job_id: id of the job.
            data_folder: the server's data folder.
            cancel: whether to stop a job that is not over, and to delete it once it has stopped.

        Returns:
            True if the job is deleted; False if it was asked to stop and will be deleted later.

        Raises:
            NotFound: no job has this id.
            Conflict: the job is not over and ``cancel`` is false, or its files are in use (see `user_of`).
        """
        now = self._clock()
        with self._database.write() as session:
            row = job_row(session, job_id)
            if not JobState(row.state).is_final:
                if not cancel:
                    raise Conflict(
                        f"job {job_id} is {row.state}; only jobs that are over can be deleted",
                        hint=f"cancel it first: share-compute cancel {job_id}; or delete it with --cancel"
                        " (?cancel=true)",
                        job=job_id,
                    )
                row.delete_requested_at = row.delete_requested_at or now
                ask_to_stop(session, row, now)
                if not JobState(row.state).is_final:
                    return False
            delete_job(session, row, data_folder, now)
            return True

    def artifact(self, job_id: str, name: str) -> None:
        """Delete one artifact of a job.

        Raises:
            NotFound: the job does not exist, or has no artifact with this name.
            Conflict: the job's files are in use (see `user_of`).
        """
        now = self._clock()
        with self._database.write() as session:
            delete_artifact(session, artifact_row(session, job_id, name), now)

    def deployment(self, key: str) -> None:
        """Delete the row and the events of a stopped or failed deployment, given its id or its name.

        Raises:
            NotFound: no deployment has this id or name.
            Conflict: the deployment is still live.
        """
        now = self._clock()
        with self._database.write() as session:
            row = deployment_row(session, key)
            if not DeploymentState(row.state).is_final:
                raise Conflict(
                    f"deployment {row.name} is {row.state}; only one that is over can be forgotten",
                    hint=f"take it down first: share-compute undeploy {row.name}",
                )
            of_deployments = (EventRow.job_id.is_(None), EventRow.kind == DEPLOYMENT)
            session.execute(
                delete(EventRow).where(*of_deployments, EventRow.data["id"].as_string() == row.id)
            )
            session.delete(row)
            _record_event(session, now, deployment=row.id, name=row.name)

    def due(self) -> list[str]:
        """Return the ids of the jobs that are over and whose deletion was requested."""
        is_requested = JobRow.delete_requested_at.is_not(None)
        with self._database.read() as session:
            return list(session.scalars(select(JobRow.id).where(is_requested, JobRow.state.in_(FINAL_JOBS))))

    def folders(self) -> list[Path]:
        """Return the folders to remove, except folders to which a new artifact was written.

        The path of an artifact is the folder itself or, for an export, its subfolder ``model``.
        """
        used = select(ArtifactRow.path)
        whole, export = RemovalRow.path, RemovalRow.path + "/model"
        query = select(RemovalRow.path).where(whole.not_in(used), export.not_in(used))
        with self._database.read() as session:
            return [Path(path) for path in session.scalars(query)]

    def removed(self, folder: Path) -> None:
        """Delete the record of a folder that was removed."""
        with self._database.write() as session:
            session.execute(delete(RemovalRow).where(RemovalRow.path == str(folder)))


def delete_job(session: Session, row: JobRow, data_folder: Path, now: datetime) -> None:
    """Delete the rows of a job, or of a sweep with its trials; record the folder for removal.

    This runs in the caller's transaction.

    Raises:
        Conflict: the job's files are in use (see `user_of`).
    """
    require_unused(session, row.id)
    for trial in session.scalars(select(JobRow).where(JobRow.sweep_id == row.id)).all():
        delete_job(session, trial, data_folder, now)
    for table in (EventRow, MetricRow, ArtifactRow):
        session.execute(delete(table).where(table.job_id == row.id))
    session.delete(row)
    remove_folder(session, job_folder(data_folder, row.kind, row.id), now)
    if row.spec.get("report"):
        remove_folder(session, data_folder / REPORTS / row.id, now)
    _record_event(session, now, job=row.id, name=row.name)


def delete_artifact(session: Session, row: ArtifactRow, now: datetime) -> None:
    """Delete an artifact's row and record its folder for removal, in the caller's transaction.

    Raises:
        Conflict: the job's files are in use (see `user_of`).
    """
    require_unused(session, row.job_id)
    session.delete(row)
    path = Path(row.path)
    remove_folder(session, path.parent if path.parent.parent.name == "exports" else path, now)
    _record_event(session, now, job=row.job_id, artifact=row.name)


def remove_folder(session: Session, folder: Path, now: datetime) -> None:
    """Record, in the caller's transaction, that a folder is to be removed."""
    dialect = sqlite if session.get_bind().dialect.name == "sqlite" else postgresql
    row = dialect.insert(RemovalRow).values(path=str(folder), asked_at=now)
    session.execute(row.on_conflict_do_nothing())


def require_unused(session: Session, job_id: str) -> None:
    """Raise Conflict if `user_of` finds a user of the job's files."""
    user = user_of(session, job_id)
    if user is not None:
        raise Conflict(
            f"{user} uses results of job {job_id}",
            hint="take the deployment down, or wait until the other job is over",
            job=job_id,
        )


def user_of(session: Session, job_id: str) -> str | None:
    """Return the first deployment or other job that uses a job's files, as ``deployment NAME`` or ``job ID``, or None.

    Users are live deployments, and other jobs that need their files, with the job's id in their model, data or links.
    The users of trials are also users of their sweep, and a sweep that is not over uses its trials.
    """
    live = [state.value for state in LIVE]
    ids = [job_id, *session.scalars(select(JobRow.id).where(JobRow.sweep_id == job_id))]
    for name, spec in session.execute(
        select(DeploymentRow.name, DeploymentRow.spec).where(DeploymentRow.state.in_(live))
    ):
        if _names(spec, ids):
            return f"deployment {name}"
    sweep = select(JobRow.sweep_id).where(JobRow.id == job_id).scalar_subquery()
    for other, owner, spec in session.execute(
        select(JobRow.id, JobRow.sweep_id, JobRow.spec).where(needs_files(), JobRow.id != job_id)
    ):
        if owner == job_id or _names(spec, ids):
            return f"job {other}"
    unfinished = session.scalar(select(JobRow.id).where(JobRow.id == sweep, JobRow.state.not_in(FINAL_JOBS)))
    return None if unfinished is None else f"sweep {unfinished}"


def _names(spec: dict[str, Any], job_ids: Sequence[str]) -> bool:
    inner = spec.get("job") or spec  # the job of a sweep
    # A path into the job's folder also contains the id, because the folder is named after it.
    text = json.dumps([inner.get("model"), inner.get("data"), inner.get("then")])
    return any(job_id in text for job_id in job_ids)


def _record_event(session: Session, now: datetime, **what: str) -> None:
    add_event(session, DELETED, now, what)
