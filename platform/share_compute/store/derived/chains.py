"""Starts the links of training jobs: the row of a deployment or batch, and the link, change in one transaction."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from share_compute.errors import Conflict
from share_compute.lifecycle.states import JobState
from share_compute.specification import GenerateJob, LinkName, ServeJob
from share_compute.store.database.database import Database
from share_compute.store.database.tables import JobRow
from share_compute.store.deployments import add_deployment
from share_compute.store.jobs import add_job, job_row
from share_compute.store.links import change_link, links_of
from share_compute.store.records import JobRecord, LinkRecord, LinkState


class Chains:
    """Links of training jobs. Each link starts at most once, because its state changes with the row that it starts."""

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._clock = clock

    def due(self) -> list[JobRecord]:
        """Return the jobs that have succeeded, still have waiting links and will not be deleted, oldest first."""
        return self._waiting([JobState.succeeded])

    def job_with_name(self, name: str) -> str | None:
        """Return the id of a job whose waiting link will use ``name`` for its deployment; None if there is none."""
        states = [JobState.queued, JobState.planning, JobState.running, JobState.succeeded]
        for job in self._waiting(states):
            serve = job.training.then.serve
            waits = any(link.name == "serve" and link.state is LinkState.waiting for link in job.links)
            if waits and serve is not None and serve.name == name:
                return job.id
        return None

    def _waiting(self, states: list[JobState]) -> list[JobRecord]:
        query = (
            select(JobRow)
            .where(
                JobRow.has_waiting_links,
                JobRow.state.in_([state.value for state in states]),
                JobRow.delete_requested_at.is_(None),
            )
            .order_by(JobRow.finished_at, JobRow.created_at, JobRow.id)
        )
        with self._database.read() as session:
            return [JobRecord.model_validate(row) for row in session.scalars(query)]

    def serve(self, job_id: str, spec: ServeJob) -> JobRecord:
        """Create the deployment of the link ``serve``, owned by the owner of the job.

        Raises:
            NotFound: no job has this id.
            Conflict: the link does not wait, or a live deployment has this name. Then nothing is changed.
        """
        with self._database.write() as session:
            row, now = self._due_row(session, job_id, "serve"), self._clock()
            made = add_deployment(session, spec, f"serves the result of {job_id}", row.owner, now)
            return _started(session, row, "serve", made.id, now)

    def generate(self, job_id: str, spec: GenerateJob) -> JobRecord:
        """Queue the batch of the link ``generate``, owned by the owner of the job.

        If the batch names a deployment, only the deployment of the link ``serve`` will answer its rows.

        Raises:
            NotFound: no job has this id.
            Conflict: the link does not wait. Then nothing is changed.
        """
        with self._database.write() as session:
            row, now = self._due_row(session, job_id, "generate"), self._clock()
            made = add_job(session, spec, row.owner, now, reason=f"submitted by {job_id}")
            if spec.deployment is not None:
                made.deployment_id = next(link.started for link in links_of(row) if link.name == "serve")
            return _started(session, row, "generate", made.id, now)

    def deployment_of(self, batch_id: str) -> str | None:
        """Return the id of the only deployment that may answer a batch; None if its specification alone decides."""
        with self._database.read() as session:
            return session.scalar(select(JobRow.deployment_id).where(JobRow.id == batch_id))

    def explain(self, job_id: str, name: LinkName, reason: str) -> JobRecord:
        """Record why a link still waits. A call that changes nothing writes no event.

        Raises:
            NotFound: no job has this id.
            Conflict: the link does not wait.
        """
        with self._database.write() as session:
            row = self._due_row(session, job_id, name)
            waits = LinkRecord(name=name, state=LinkState.waiting, reason=reason)
            if waits not in links_of(row):
                change_link(session, row, waits, self._clock())
            return JobRecord.model_validate(row)

    def fail(self, job_id: str, name: LinkName, reason: str, error: dict[str, Any]) -> JobRecord:
        """Record that a waiting link could not start.

        Raises:
            NotFound: no job has this id.
            Conflict: the link does not wait.
        """
        with self._database.write() as session:
            row = self._due_row(session, job_id, name)
            failed = LinkRecord(name=name, state=LinkState.failed, reason=reason, error=error)
            change_link(session, row, failed, self._clock())
            return JobRecord.model_validate(row)

    def _due_row(self, session: Session, job_id: str, name: LinkName) -> JobRow:
        row = job_row(session, job_id)
        waits = any(link.name == name and link.state is LinkState.waiting for link in links_of(row))
        if not waits or row.state != JobState.succeeded or row.delete_requested_at is not None:
            raise Conflict(
                f"then.{name} of job {job_id} does not wait to be started",
                hint=f"share-compute show {job_id}",
                job=job_id,
            )
        return row


def _started(session: Session, row: JobRow, name: LinkName, made: str, now: datetime) -> JobRecord:
    started = LinkRecord(name=name, state=LinkState.started, reason=f"{made} was started", started=made)
    change_link(session, row, started, now)
    return JobRecord.model_validate(row)
