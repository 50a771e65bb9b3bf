"""Applies the reports of attempts to the database, and reads metrics and artifacts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, Subquery, delete, func, or_, select, tuple_, union_all, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session, aliased

from share_compute.errors import Conflict, NotFound
from share_compute.lifecycle.attempt_events import (
    ArtifactSaved,
    AttemptEnded,
    AttemptEvent,
    CheckpointSaved,
    ComputationChosen,
    LayersTimed,
    LinkCut,
    Measured,
    Note,
    Offended,
    Pictured,
    Planned,
    Protection,
    RangesPlaced,
    Reformed,
    ReplanAbandoned,
    ReplanProposed,
    RowsDone,
    Started,
    StepCommitted,
    Validated,
)
from share_compute.lifecycle.states import ContributorState, JobState
from share_compute.planning.cost.timings import MachineTimings, merged
from share_compute.planning.plan import Plan
from share_compute.specification.job import Report
from share_compute.store.contributors import note_cut, note_offence
from share_compute.store.database.database import Database
from share_compute.store.database.tables import ArtifactRow, ContributorRow, EventRow, JobRow, MetricRow
from share_compute.store.events import add_job_events
from share_compute.store.jobs import job_row, move_job
from share_compute.store.records import ArtifactRecord, JobRecord, MetricRecord
from share_compute.store.secret import new_id
from share_compute.store.work import lease_changes, parts, record_free, record_work

_USABLE = (ContributorState.ready, ContributorState.draining)
_IN_ORDER = (MetricRow.step, MetricRow.split == "test", MetricRow.split)
"""Order of metrics: by the step, and at one step train, validation, test."""


class Progress:
    """Applies the reports of attempts to the database, and reads metrics and artifacts."""

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._clock = clock

    def record(self, job_id: str, attempt: int, events: Sequence[AttemptEvent]) -> JobRecord:
        """Write the events that an attempt reported, and update the rows that they change, in one transaction.

        Raises:
            NotFound: no job has this id.
            Conflict: ``attempt`` is not the job's current attempt, or the job is not active. Then nothing is written.
        """
        now = self._clock()
        with self._database.write() as session:
            row = job_row(session, job_id)
            if row.attempt != attempt or row.state not in (JobState.planning, JobState.running):
                raise Conflict(
                    f"attempt {attempt} is over: the job is {row.state} at attempt {row.attempt}",
                    hint="end the attempt",
                    job=job_id,
                )
            log: list[tuple[str, dict[str, Any]]] = []
            for event in events:
                if isinstance(event, Pictured):
                    picture = event.model_dump(mode="json", exclude={"type"})
                    name = event.split if event.task is None else f"{event.split}.{event.task}"
                    row.pictures = {**(row.pictures or {}), name: picture}
                    continue
                log.append((event.type, event.model_dump(mode="json", exclude={"type"})))
                if isinstance(event, (Planned, RangesPlaced, Reformed, RowsDone, AttemptEnded)):
                    # Write the log first: `_apply` writes further events (state, work), which must come later.
                    add_job_events(session, (job_id, attempt), now, log)
                    log = []
                if isinstance(event, Offended):
                    note_offence(session, event.machine, now, job_id=job_id, offence=event)
                if isinstance(event, LinkCut):
                    note_cut(session, *event.machines)
                _apply(session, row, event, now)
            add_job_events(session, (job_id, attempt), now, log)
            return JobRecord.model_validate(row)

    def timings(self, job_id: str) -> dict[str, MachineTimings]:
        """Return {contributor id: measured layer times} of a job; raise NotFound if there is no such job."""
        with self._database.read() as session:
            return _timings(job_row(session, job_id))

    def last_step(self, job_id: str) -> int:
        """Return the last step for which a job has training metrics; 0 if there is none."""
        query = select(func.max(MetricRow.step)).where(MetricRow.job_id == job_id, MetricRow.split == "train")
        with self._database.read() as session:
            return session.scalar(query) or 0

    def metrics(
        self, job_id: str, *, after_step: int = 0, until_step: int | None = None, most: int | None = None
    ) -> list[MetricRecord]:
        """Return the metrics of a job by step, then train, validation, test; raise NotFound if there is no such job.

        Args:
            job_id: id of the job.
            after_step: only steps after this one.
            until_step: only steps up to this one; None for all.
            most: approximate maximum number of metrics of each split; more are reduced by min-max decimation of the
                loss. None for all.
        """
        wanted = [MetricRow.job_id == job_id, MetricRow.step > after_step]
        if until_step is not None:
            wanted.append(MetricRow.step <= until_step)
        query = select(MetricRow).where(*wanted).order_by(*_IN_ORDER)
        if most is not None:
            chosen = _decimated(wanted, most)
            query = query.join(
                chosen, (chosen.c.split == MetricRow.split) & (chosen.c.step == MetricRow.step)
            )
        with self._database.read() as session:
            job_row(session, job_id)
            return [MetricRecord.model_validate(row) for row in session.scalars(query)]

    def metrics_after(self, job_id: str, last: MetricRecord | None, *, limit: int) -> list[MetricRecord]:
        """Return at most ``limit`` metrics that follow ``last`` in the order of steps and splits; None: the first."""
        query = select(MetricRow).where(MetricRow.job_id == job_id)
        if last is not None:
            query = query.where(tuple_(*_IN_ORDER) > tuple_(last.step, last.split == "test", last.split))
        query = query.order_by(*_IN_ORDER).limit(limit)
        with self._database.read() as session:
            return [MetricRecord.model_validate(row) for row in session.scalars(query)]

    def latest(self, job_ids: Collection[str]) -> dict[str, dict[str, dict[str, Any]]]:
        """Return {job id: {split: data of its last metrics}} by one query; splits without metrics are missing."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        with self._database.read() as session:
            query = union_all(*(_last_metrics(split, job_ids) for split in ("train", "validation", "test")))
            for job_id, split, data in session.execute(query):
                found.setdefault(job_id, {})[split] = data
        return found

    def pictures(self, job_id: str) -> list[Pictured]:
        """Return the last predictions of each split, and of each task, of a job.

        Raises:
            NotFound: there is no such job.
        """
        with self._database.read() as session:
            found = job_row(session, job_id).pictures or {}
        pictures = [Pictured.model_validate(picture) for picture in found.values()]
        return [picture for split in ("validation", "test") for picture in pictures if picture.split == split]

    def traffic(self, job_id: str) -> dict[int, tuple[int, int]]:
        """Return the bytes that all machines of a job sent and received, by the step of the report."""
        query = select(EventRow.data).where(EventRow.job_id == job_id, EventRow.kind == "traffic")
        found: dict[int, tuple[int, int]] = {}
        with self._database.read() as session:
            for data in session.scalars(query.order_by(EventRow.seq).execution_options(yield_per=1000)):
                links = data["machines"].values()
                sent, received = found.get(data["step"], (0, 0))
                sent += sum(link["sent_bytes"] for link in links)
                received += sum(link["received_bytes"] for link in links)
                found[data["step"]] = sent, received
        return found

    def add_artifact(self, job_id: str, saved: ArtifactSaved) -> ArtifactRecord:
        """Record an artifact that was made outside of the job's attempts; replace an artifact with the same name.

        Raises:
            NotFound: no job has this id.
        """
        now = self._clock()
        with self._database.write() as session:
            row = job_row(session, job_id)
            _apply(session, row, saved, now)
            events = [(saved.type, saved.model_dump(mode="json", exclude={"type"}))]
            add_job_events(session, (job_id, row.attempt), now, events)
        return self.artifact(job_id, saved.name)

    def add_report(self, job: JobRecord, saved: ArtifactSaved) -> bool:
        """Record a written report of a job as an artifact, and note that it is no longer due.

        Returns:
            False without a change, if the job has been resumed since ``job`` was read.

        Raises:
            NotFound: no job has this id.
        """
        now = self._clock()
        with self._database.write() as session:
            row = job_row(session, job.id)
            if row.finished_at != job.finished_at:
                return False
            row.due_reports = [report for report in row.due_reports if report != saved.name]
            row.has_due_reports = bool(row.due_reports)
            _apply(session, row, saved, now)
            events = [(saved.type, saved.model_dump(mode="json", exclude={"type"}))]
            add_job_events(session, (job.id, row.attempt), now, events)
        return True

    def add_note(self, job_id: str, note: Note) -> None:
        """Add a line from outside of the job's attempts to the job's log; raise NotFound if there is no such job."""
        with self._database.write() as session:
            row = job_row(session, job_id)
            events = [(note.type, note.model_dump(mode="json", exclude={"type"}))]
            add_job_events(session, (job_id, row.attempt), self._clock(), events)

    def unreported(self, since: datetime) -> list[tuple[JobRecord, tuple[Report, ...]]]:
        """Return the training jobs that have ended, with the reports that were not written since the end.

        Args:
            since: only jobs that ended after this time.
        """
        query = select(JobRow).where(
            JobRow.has_due_reports, JobRow.finished_at > since, JobRow.delete_requested_at.is_(None)
        )
        with self._database.read() as session:
            rows = session.scalars(query.order_by(JobRow.finished_at))
            return [(JobRecord.model_validate(row), tuple(row.due_reports)) for row in rows]

    def artifacts(self, job_id: str) -> list[ArtifactRecord]:
        """Return a job's artifacts sorted by name; raise NotFound if there is no such job."""
        with self._database.read() as session:
            job_row(session, job_id)
            rows = session.scalars(
                select(ArtifactRow).where(ArtifactRow.job_id == job_id).order_by(ArtifactRow.name)
            )
            return [ArtifactRecord.model_validate(row) for row in rows]

    def newest_artifacts(
        self, kind: str, limit: int, owner: str | None = None, *, skip: int = 0
    ) -> list[tuple[JobRecord, ArtifactRecord]]:
        """Return the newest artifacts of jobs of one kind, with their jobs.

        Args:
            kind: kind of the jobs.
            limit: maximum number of artifacts.
            owner: id of the API key that owns the jobs; None for all jobs.
            skip: number of newer artifacts to leave out.
        """
        query = (
            select(JobRow, ArtifactRow)
            .join(ArtifactRow, ArtifactRow.job_id == JobRow.id)
            .where(JobRow.kind == kind, JobRow.delete_requested_at.is_(None))
            .order_by(ArtifactRow.created_at.desc(), ArtifactRow.id)
            .limit(limit)
            .offset(skip)
        )
        if owner is not None:
            query = query.where(JobRow.owner == owner)
        with self._database.read() as session:
            return [
                (JobRecord.model_validate(job), ArtifactRecord.model_validate(artifact))
                for job, artifact in session.execute(query)
            ]

    def artifact(self, job_id: str, name: str) -> ArtifactRecord:
        """Return the artifact with this name, or raise NotFound."""
        with self._database.read() as session:
            return ArtifactRecord.model_validate(artifact_row(session, job_id, name))


def artifact_row(session: Session, job_id: str, name: str) -> ArtifactRow:
    """Return the row of the job's artifact with this name, or raise NotFound."""
    row = session.scalar(select(ArtifactRow).where(ArtifactRow.job_id == job_id, ArtifactRow.name == name))
    if row is None:
        job = job_row(session, job_id)
        raise NotFound(
            f"job {job_id} has no artifact {name}",
            hint=f"the job has ended ({job.state}); share-compute artifacts list {job_id} shows what it has"
            if JobState(job.state).is_final
            else f"the job is {job.state}: wait for its end with share-compute logs -f {job_id}",
            job=job_id,
        )
    return row


def _last_metrics(split: str, job_ids: Collection[str]) -> Select[tuple[str, str, dict[str, Any]]]:
    """Return a query for the metrics at each job's last step with metrics of this split.

    The step is looked up in the primary key for each job, so that a long job costs as little as a short one.
    """
    other = aliased(MetricRow)
    step = select(func.max(other.step)).where(other.job_id == JobRow.id, other.split == split)
    is_last = (
        (MetricRow.job_id == JobRow.id)
        & (MetricRow.split == split)
        & (MetricRow.step == step.scalar_subquery())
    )
    return (
        select(MetricRow.job_id, MetricRow.split, MetricRow.data)
        .select_from(JobRow)
        .join(MetricRow, is_last)
        .where(JobRow.id.in_(job_ids))
    )


def _decimated(wanted: Sequence[ColumnElement[bool]], most: int) -> Subquery:
    """Return a subquery for the (split, step) of the metrics that remain after min-max decimation of the loss.

    If a split has more than ``most`` metrics, its steps are divided into ``most // 2`` sections of consecutive steps.
    Each section keeps its minimum and its maximum. The first and the last step of the split are kept too.
    """
    loss = MetricRow.data["loss"].as_float()
    rows = select(
        MetricRow.split,
        MetricRow.step,
        loss.label("loss"),
        (func.row_number().over(partition_by=MetricRow.split, order_by=MetricRow.step) - 1).label("place"),
        func.count().over(partition_by=MetricRow.split).label("all"),
    ).where(*wanted)
    row = rows.subquery().c
    stretch = row.place * (most // 2) // row.all
    ranked = select(
        row.split,
        row.step,
        func.row_number().over(partition_by=(row.split, stretch), order_by=(row.loss, row.step)).label("low"),
        func.row_number()
        .over(partition_by=(row.split, stretch), order_by=(row.loss.desc(), row.step))
        .label("high"),
        or_(row.all <= most, row.place == 0, row.place == row.all - 1).label("kept"),
    )
    one = ranked.subquery().c
    return select(one.split, one.step).where(or_(one.kept, one.low == 1, one.high == 1)).subquery()


def _apply(session: Session, row: JobRow, event: AttemptEvent, now: datetime) -> None:
    match event:
        case (
            Planned()
            | RangesPlaced()
            | Reformed()
            | Protection()
            | ComputationChosen()
            | ReplanProposed()
            | ReplanAbandoned()
        ):
            _apply_plan(session, row, event, now)
        case Started():
            # If members of an earlier attempt continue, their first step may not follow the checkpoint.
            row.step = event.first_step - 1
            row.total_steps = event.total_steps
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
        case CheckpointSaved():
            row.checkpoint_path, row.checkpoint_step = str(event.path), event.step
        case ArtifactSaved():
            session.execute(
                delete(ArtifactRow).where(ArtifactRow.job_id == row.id, ArtifactRow.name == event.name)
            )
            session.add(
                ArtifactRow(
                    id=new_id("art"),
                    job_id=row.id,
                    name=event.name,
                    path=str(event.path),
                    size_bytes=event.size_bytes,
                    created_at=now,
                )
            )
        case RowsDone():
            row.rows, row.tokens_per_s = event.model_dump(mode="json"), event.tokens_per_s
            if row.state == JobState.planning:
                left = _count(event.total - event.done, "row")
                move_job(session, row, JobState.running, f"{left} to answer", now)
        case AttemptEnded():
            move_job(session, row, JobState(event.outcome), event.reason, now, error=event.error)
            row.tokens_per_s = _mean_speed(session, row)
        case _:
            pass  # other reports are only logged; `record` handles offences and cut links


def _mean_speed(session: Session, row: JobRow) -> float | None:
    """Return the mean speed over all steps of a job, in tokens per second; without steps, its last speed."""
    tokens, seconds = (func.sum(MetricRow.data[name].as_float()) for name in ("tokens", "seconds"))
    query = select(tokens / func.nullif(seconds, 0.0))
    mean = session.scalar(query.where(MetricRow.job_id == row.id, MetricRow.split == "train"))
    return row.tokens_per_s if mean is None else float(mean)


def _apply_plan(
    session: Session,
    row: JobRow,
    event: Planned
    | RangesPlaced
    | Reformed
    | Protection
    | ComputationChosen
    | ReplanProposed
    | ReplanAbandoned,
    now: datetime,
) -> None:
    """Apply a report about a job's computation or plans; lease and release machines accordingly."""
    match event:
        case Planned(plan=plan):
            _lay(session, row, plan, now)
            if row.state == JobState.planning:
                move_job(session, row, JobState.running, _placement(plan), now)
        case RangesPlaced():
            _release_all_but(session, row, event.machines, now)
            if row.state == JobState.planning:
                move_job(session, row, JobState.running, event.sentence, now)
            row.reason = event.sentence
        case Reformed(plan=plan, expected=expected):
            _lay(session, row, plan, now, expected)
            row.reason = _placement(plan)
            row.measured = None  # the measurement belongs to the previous plan
            row.proposal = row.proposal if expected else None
        case Protection():
            row.is_protected = event.is_protected
        case ComputationChosen():
            row.computation = event.sentence
        case ReplanProposed(plan=plan):
            row.proposal = event.model_dump(mode="json")
            _lease(session, row, plan, now, ContributorState.ready)
        case ReplanAbandoned():
            row.proposal = None
            _release_all_but(session, row, Plan.model_validate(row.plan).machines, now)


def _lay(session: Session, row: JobRow, plan: Plan, now: datetime, expected: Collection[str] = ()) -> None:
    """Store a plan, lease its free machines to the job, and release the job's machines that are not in the plan.

    Machines in ``expected`` are not released: they are still joining for a proposed plan.
    """
    row.plan, row.is_protected = plan.model_dump(mode="json"), False
    _release_all_but(session, row, plan.machines.union(expected), now)
    _lease(session, row, plan, now, *_USABLE)


def _lease(session: Session, row: JobRow, plan: Plan, now: datetime, *states: ContributorState) -> None:
    """Lease to a job the machines of its plan that are in one of ``states`` and not leased yet."""
    used = ContributorRow.id.in_(plan.machines)
    free = ContributorRow.job_id.is_(None) & ContributorRow.deployment_id.is_(None)
    usable = ContributorRow.state.in_([state.value for state in states])
    session.execute(update(ContributorRow).where(used, free, usable).values(job_id=row.id))
    leased = session.scalars(select(ContributorRow.id).where(ContributorRow.job_id == row.id)).all()
    held = parts(row.plan) if row.plan else None
    record_work(session, now, lease_changes(session, {"job": row.id, "name": row.name}, leased, held))


def _release_all_but(session: Session, row: JobRow, kept: Collection[str], now: datetime) -> None:
    others = (ContributorRow.job_id == row.id) & ContributorRow.id.not_in(kept)
    record_free(session, now, others)
    session.execute(update(ContributorRow).where(others).values(job_id=None))


def _timings(row: JobRow) -> dict[str, MachineTimings]:
    kept = row.timings or {}
    return {machine: MachineTimings.model_validate(timed) for machine, timed in kept.items()}


def _placement(plan: Plan) -> str:
    if plan.branches:
        machines, branches = _count(len(plan.machines), "machine"), len(plan.branches)
        return f"running on {machines} in {branches} {'branch' if branches == 1 else 'branches'}"
    return f"running on {_count(sum(plan.stage_sizes), 'machine')} in {_count(len(plan.stages), 'stage')}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _put_metric(session: Session, job_id: str, split: str, event: StepCommitted | Validated) -> None:
    # A validation has only the metrics of its task.
    is_validation = isinstance(event, Validated)
    left_out = {"type", "step", "split"} if event.tasks else {"type", "step", "split", "tasks"}
    data = event.model_dump(mode="json", exclude=left_out, exclude_none=is_validation)
    dialect = sqlite if session.get_bind().dialect.name == "sqlite" else postgresql
    row = dialect.insert(MetricRow).values(job_id=job_id, split=split, step=event.step, data=data)
    newest = {"data": row.excluded.data}
    session.execute(row.on_conflict_do_update(index_elements=["job_id", "split", "step"], set_=newest))
