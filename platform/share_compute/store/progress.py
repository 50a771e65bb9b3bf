"""What attempts report, as rows: progress, metrics, checkpoints, artifacts and the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from share_compute.errors import Conflict, NotFound
from share_compute.jobs.events import (
    ArtifactSaved,
    AttemptEnded,
    AttemptEvent,
    CheckpointSaved,
    LayersTimed,
    Measured,
    Planned,
    Reformed,
    ReplanProposed,
    StepCommitted,
    Validated,
)
from share_compute.jobs.states import ContributorState, JobState
from share_compute.planning.plan import Plan
from share_compute.planning.timings import MachineTimings, merged
from share_compute.store.database import Database
from share_compute.store.events import add_job_events
from share_compute.store.jobs import job_row, move_job
from share_compute.store.records import ArtifactRecord, JobRecord, MetricRecord
from share_compute.store.secret import new_id
from share_compute.store.tables import Artifact, Contributor, Job, Metric

_USABLE = (ContributorState.ready.value, ContributorState.draining.value)


class Progress:
    """The tables of metrics and artifacts, and all that an attempt writes."""

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._clock = clock

    def record(self, job_id: str, attempt: int, events: Sequence[AttemptEvent]) -> JobRecord:
        """Write what an attempt reported, all in one transaction.

        Raises:
            Conflict: a newer attempt runs, or the job is over; nothing is written.
        """
        now = self._clock()
        with self._database.write() as session:
            row = job_row(session, job_id)
            if row.attempt != attempt or row.state not in (JobState.planning, JobState.running):
                raise Conflict(
                    f"attempt {attempt} is over: the job is {row.state} at attempt {row.attempt}",
                    mend="end the attempt",
                    job=job_id,
                )
            log: list[tuple[str, dict[str, Any]]] = []
            for event in events:
                log.append((event.type, event.model_dump(mode="json", exclude={"type"})))
                if isinstance(event, (Planned, AttemptEnded)):
                    # Both change the state, whose event belongs after what came before.
                    add_job_events(session, (job_id, attempt), now, log)
                    log = []
                _apply(session, row, event, now)
            add_job_events(session, (job_id, attempt), now, log)
            return JobRecord.model_validate(row)

    def timings(self, job_id: str) -> dict[str, MachineTimings]:
        """Return what all attempts at a job timed of its layers, by contributor id; NotFound without the job."""
        with self._database.read() as session:
            return _timings(job_row(session, job_id))

    def metrics(self, job_id: str, *, after_step: int = 0) -> list[MetricRecord]:
        """Return what the steps after ``after_step`` measured, in order; NotFound without the job."""
        query = (
            select(Metric)
            .where(Metric.job_id == job_id, Metric.step > after_step)
            .order_by(Metric.step, Metric.split)
        )
        with self._database.read() as session:
            job_row(session, job_id)
            return [MetricRecord.model_validate(row) for row in session.scalars(query)]

    def artifacts(self, job_id: str) -> list[ArtifactRecord]:
        """Return a job's finished results by name; NotFound without the job."""
        with self._database.read() as session:
            job_row(session, job_id)
            rows = session.scalars(select(Artifact).where(Artifact.job_id == job_id).order_by(Artifact.name))
            return [ArtifactRecord.model_validate(row) for row in rows]

    def artifact(self, job_id: str, name: str) -> ArtifactRecord:
        """Return one finished result; NotFound when there is none of this name."""
        with self._database.read() as session:
            row = session.scalar(select(Artifact).where(Artifact.job_id == job_id, Artifact.name == name))
            if row is None:
                job = job_row(session, job_id)
                raise NotFound(
                    f"job {job_id} has no artifact {name}",
                    mend=f"the job is {job.state}; share-compute artifacts list {job_id} shows what it has",
                    job=job_id,
                )
            return ArtifactRecord.model_validate(row)


def _apply(session: Session, row: Job, event: AttemptEvent, now: datetime) -> None:
    match event:
        case Planned(plan=plan):
            _lay(session, row, plan)
            if row.state == JobState.planning:
                move_job(session, row, JobState.running, _placement(plan), now)
        case Reformed(plan=plan):
            _lay(session, row, plan)
            row.reason = _placement(plan)
            row.measured = row.proposal = None  # of the plan that is over
        case StepCommitted():
            row.step, row.loss, row.tokens_per_s = event.step, event.loss, event.tokens_per_s
            _put_metric(session, row.id, "train", event)
        case Validated():
            _put_metric(session, row.id, event.split, event)
        case Measured():
            row.measured = event.model_dump(mode="json")
        case LayersTimed():
            kept = merged(_timings(row), event.machines)
            row.timings = {machine: timed.model_dump(mode="json") for machine, timed in kept.items()}
        case ReplanProposed():
            row.proposal = event.model_dump(mode="json")
        case CheckpointSaved():
            row.checkpoint_path, row.checkpoint_step = str(event.path), event.step
        case ArtifactSaved():
            session.execute(delete(Artifact).where(Artifact.job_id == row.id, Artifact.name == event.name))
            session.add(
                Artifact(
                    id=new_id("art"),
                    job_id=row.id,
                    name=event.name,
                    path=str(event.path),
                    size_bytes=event.size_bytes,
                    created_at=now,
                )
            )
        case AttemptEnded():
            move_job(session, row, JobState(event.outcome), event.reason, now, error=event.error)
        case _:
            pass  # a start, a sample or a note changes nothing but the log


def _lay(session: Session, row: Job, plan: Plan) -> None:
    """Write a plan down: the job holds the machines in it and no others, but takes none from another job."""
    row.plan = plan.model_dump(mode="json")
    held = Contributor.job_id == row.id
    used = Contributor.id.in_([member.contributor_id for pool in plan.pools for member in pool.members])
    free = Contributor.job_id.is_(None) & Contributor.state.in_(_USABLE)
    session.execute(update(Contributor).where(held, ~used).values(job_id=None))
    session.execute(update(Contributor).where(used, free).values(job_id=row.id))


def _timings(row: Job) -> dict[str, MachineTimings]:
    kept = row.timings or {}
    return {machine: MachineTimings.model_validate(timed) for machine, timed in kept.items()}


def _placement(plan: Plan) -> str:
    return f"running on {_count(sum(plan.pool_sizes), 'machine')} in {_count(len(plan.pools), 'pool')}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _put_metric(session: Session, job_id: str, split: str, event: StepCommitted | Validated) -> None:
    data = event.model_dump(mode="json", exclude={"type", "step", "split"})
    dialect = sqlite if session.get_bind().dialect.name == "sqlite" else postgresql
    row = dialect.insert(Metric).values(job_id=job_id, split=split, step=event.step, data=data)
    newest = {"data": row.excluded.data}
    session.execute(row.on_conflict_do_update(index_elements=["job_id", "split", "step"], set_=newest))
