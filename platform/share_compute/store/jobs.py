"""Job rows and their life cycle. Every state change checks the state machine and writes an event."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Any, TypedDict, Unpack

from sqlalchemy import ColumnElement, ScalarSelect, cast, func, select, tuple_, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine import CursorResult
from sqlalchemy.orm import Session

from share_compute.errors import Conflict, NotFound
from share_compute.lifecycle.states import ContributorState, JobState, check_transition
from share_compute.specification import BATCH_KINDS, AnyJob, SweepJob, TrainJob
from share_compute.store.database.cursors import read_cursor, write_cursor
from share_compute.store.database.database import Database
from share_compute.store.database.tables import ContributorRow, EventRow, JobRow
from share_compute.store.events import add_event
from share_compute.store.links import cancel_links, first_links, move_links, needs_files, restart_links
from share_compute.store.records import JobRecord, QueuedJob
from share_compute.store.secret import new_id
from share_compute.store.suggestions import suggested_job
from share_compute.store.work import lease_changes, record_free, record_work


class JobLabels(TypedDict, total=False):
    """New labels of a job."""

    tags: Sequence[str]
    group: str | None
    note: str


class Jobs:
    """The table of jobs."""

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._clock = clock

    def create(
        self, spec: AnyJob, *, owner: str | None = None, idempotency_key: str | None = None
    ) -> JobRecord:
        """Queue a job. A repeated call with the same owner, ``idempotency_key`` and spec returns the existing job.

        Args:
            spec: the requested job.
            owner: id of the API key that owns the job; None if only admins may change it.
            idempotency_key: text chosen by the owner; two owners may choose the same text for different jobs.

        Raises:
            Conflict: the owner used ``idempotency_key`` for another job.
        """
        data = spec.model_dump(mode="json")
        now = self._clock()
        with self._database.write() as session:
            key = _owned(idempotency_key, owner)
            twin = _twin(session, key, data)
            if twin is not None:
                return JobRecord.model_validate(twin)
            return JobRecord.model_validate(add_job(session, spec, owner, now, idempotency_key=key))

    def submitted(
        self, spec: AnyJob, *, owner: str | None = None, idempotency_key: str | None = None
    ) -> JobRecord | None:
        """Return the job that `create` would return without queuing a job; None if it would queue one.

        Raises:
            Conflict: the owner used ``idempotency_key`` for another job.
        """
        with self._database.read() as session:
            twin = _twin(session, _owned(idempotency_key, owner), spec.model_dump(mode="json"))
            return None if twin is None else JobRecord.model_validate(twin)

    def first(self, idempotency_key: str, *, owner: str | None = None) -> JobRecord | None:
        """Return the owner's job that was submitted with an idempotency key; None if there is none."""
        with self._database.read() as session:
            query = select(JobRow).where(JobRow.idempotency_key == _owned(idempotency_key, owner))
            row = session.scalar(query)
            return None if row is None else JobRecord.model_validate(row)

    def get(self, job_id: str) -> JobRecord:
        """Return the job with this id, or raise NotFound."""
        with self._database.read() as session:
            return JobRecord.model_validate(job_row(session, job_id))

    def page(
        self,
        *,
        states: Collection[JobState] | None = None,
        kind: str | None = None,
        name: str | None = None,
        tags: Collection[str] = (),
        group: str | None = None,
        trials: bool = True,
        limit: int = 50,
        cursor: str | None = None,
    ) -> tuple[list[JobRecord], str | None]:
        """Return a page of jobs, newest first, and the cursor of the next page if there is one.

        Args:
            states: only jobs in one of these states; None for all.
            kind: only jobs of this kind; None for all.
            name: only jobs whose name contains this text, ignoring case; None for all.
            tags: only jobs that have all of these tags.
            group: only jobs of this group; None for all.
            trials: whether trials of sweeps are among the jobs.
            limit: maximum number of jobs to return.
            cursor: cursor that came with the previous page; None for the first page.
        """
        query = select(JobRow).order_by(JobRow.created_at.desc(), JobRow.id.desc()).limit(limit + 1)
        if states is not None:
            query = query.where(JobRow.state.in_([state.value for state in states]))
        if kind is not None:
            query = query.where(JobRow.kind == kind)
        if name is not None:
            query = query.where(JobRow.name.icontains(name, autoescape=True))
        query = query.where(*(_has_tag(tag, self._database.kind) for tag in tags))
        if group is not None:
            query = query.where(JobRow.group == group)
        if not trials:
            query = query.where(JobRow.sweep_id.is_(None))
        if cursor is not None:
            query = query.where(tuple_(JobRow.created_at, JobRow.id) < tuple_(*read_cursor(cursor)))
        with self._database.read() as session:
            found = [JobRecord.model_validate(row) for row in session.scalars(query)]
        page = found[:limit]
        return page, write_cursor(page[-1].created_at, page[-1].id) if len(found) > limit else None

    def label(self, job_id: str, **labels: Unpack[JobLabels]) -> JobRecord:
        """Change labels of a job, also after its end; labels that are not given keep their values.

        Raises:
            NotFound: no job has this id.
        """
        with self._database.write() as session:
            row = job_row(session, job_id)
            row.tags = list(labels.get("tags", row.tags))
            row.group = labels.get("group", row.group)
            row.note = labels.get("note", row.note)
            now = {"tags": row.tags, "group": row.group, "note": row.note}
            add_event(session, "labelled", self._clock(), now, job=(row.id, row.attempt))
            return JobRecord.model_validate(row)

    def queued(self, kinds: Collection[str] | None = None) -> list[JobRecord]:
        """Return the queued jobs of these kinds, or of all kinds, oldest first."""
        return self._in_order([JobState.queued], kinds)

    def queue(self) -> list[QueuedJob]:
        """Return all queued jobs, oldest first, without their specifications."""
        columns = (
            JobRow.id,
            JobRow.name,
            JobRow.kind,
            JobRow.reason,
            JobRow.sweep_id,
            JobRow.attempt,
            JobRow.fruitless_attempts,
        )
        query = (
            select(*columns, JobRow.created_at, _attempt_began().label("began"))
            .where(JobRow.state == JobState.queued.value)
            .order_by(JobRow.created_at, JobRow.id)
        )
        with self._database.read() as session:
            rows = session.execute(query).mappings().all()
        return [QueuedJob(**{**row, "waiting_since": row["began"] or row["created_at"]}) for row in rows]

    def failed_since(self, moment: datetime) -> list[JobRecord]:
        """Return the jobs that failed at ``moment`` or later, newest failure first."""
        query = (
            select(JobRow)
            .where(JobRow.state == JobState.failed.value, JobRow.finished_at >= moment)
            .order_by(JobRow.finished_at.desc(), JobRow.id)
        )
        with self._database.read() as session:
            return [JobRecord.model_validate(row) for row in session.scalars(query)]

    def active(self, kinds: Collection[str] | None = None) -> list[JobRecord]:
        """Return the jobs of these kinds, or of all kinds, that are being planned or run, oldest first."""
        return self._in_order([JobState.planning, JobState.running], kinds)

    def with_needed_files(self) -> list[JobRecord]:
        """Return the jobs that need the files in their specification (see `needs_files`)."""
        with self._database.read() as session:
            return [
                JobRecord.model_validate(row) for row in session.scalars(select(JobRow).where(needs_files()))
            ]

    def _in_order(self, states: Collection[JobState], kinds: Collection[str] | None) -> list[JobRecord]:
        query = (
            select(JobRow)
            .where(JobRow.state.in_([state.value for state in states]))
            .order_by(JobRow.created_at, JobRow.id)
        )
        if kinds is not None:
            query = query.where(JobRow.kind.in_(kinds))
        with self._database.read() as session:
            return [JobRecord.model_validate(row) for row in session.scalars(query)]

    def counts(self) -> dict[JobState, int]:
        """Return {state: number of jobs}, with 0 for states without jobs."""
        with self._database.read() as session:
            rows = session.execute(select(JobRow.state, func.count()).group_by(JobRow.state)).all()
        found = {JobState(state): count for state, count in rows}
        return {state: found.get(state, 0) for state in JobState}

    def explain(self, job_id: str, reason: str) -> None:
        """Record the reason why a job is still queued; do nothing if the job is no longer queued."""
        with self._database.write() as session:
            row = job_row(session, job_id)
            if row.state == JobState.queued and row.reason != reason:
                row.reason = reason
                _record_event(session, row, row.state, self._clock())

    def begin(
        self, job_id: str, contributor_ids: Collection[str], reason: str = "making a plan"
    ) -> JobRecord:
        """Lease contributors to a queued job and set its state to ``planning``.

        Raises:
            NotFound: no job has this id.
            Conflict: the job is not queued, or a contributor is unknown, not ready or already leased. Then nothing is
                changed.
        """
        with self._database.write() as session:
            row = job_row(session, job_id)
            now = self._clock()
            move_job(session, row, JobState.planning, reason, now)
            leased = session.execute(
                update(ContributorRow)
                .where(
                    ContributorRow.id.in_(contributor_ids),
                    ContributorRow.state == ContributorState.ready.value,
                    ContributorRow.job_id.is_(None),
                    ContributorRow.deployment_id.is_(None),
                )
                .values(job_id=job_id)
            )
            assert isinstance(leased, CursorResult)
            if leased.rowcount != len(contributor_ids):
                raise Conflict(
                    f"only {leased.rowcount} of {len(contributor_ids)} contributors are still free",
                    hint="list the free contributors, and try again",
                    job=job_id,
                )
            holder = {"job": job_id, "name": row.name}
            record_work(session, now, lease_changes(session, holder, contributor_ids, None))
            return JobRecord.model_validate(row)

    def move(
        self,
        job_id: str,
        state: JobState,
        reason: str,
        *,
        attempt: int,
        error: dict[str, Any] | None = None,
    ) -> JobRecord:
        """Change the state of a job whose attempt is over, for example to ``failed``, and release its contributors.

        Raises:
            NotFound: no job has this id.
            Conflict: ``attempt`` is not the job's current attempt, or the state machine forbids the change.
        """
        with self._database.write() as session:
            row = job_row(session, job_id)
            _require_attempt(row, attempt)
            move_job(session, row, state, reason, self._clock(), error=error)
            return JobRecord.model_validate(row)

    def cancel(self, job_id: str) -> JobRecord:
        """Cancel a queued job at once, or ask an active job to stop. A second call changes nothing.

        For a job that has succeeded, cancel its waiting links.

        Raises:
            NotFound: no job has this id.
            Conflict: the job has failed, or it has succeeded and none of its links waits.
        """
        now = self._clock()
        with self._database.write() as session:
            row = job_row(session, job_id)
            if row.state == JobState.succeeded and cancel_links(session, row, now):
                return JobRecord.model_validate(row)
            if row.state == JobState.cancelled:
                return JobRecord.model_validate(row)
            if JobState(row.state).is_final:
                raise Conflict(
                    f"job {job_id} has {row.state} already", hint="nothing is left to cancel", job=job_id
                )
            ask_to_stop(session, row, now)
            return JobRecord.model_validate(row)

    def resume(self, job_id: str) -> JobRecord:
        """Queue a failed or cancelled job again. For a job that has succeeded, start its links again.

        A training job continues from its last checkpoint, a batch job after its finished rows. A job without a
        checkpoint or finished rows starts over.

        Raises:
            NotFound: no job has this id.
            Conflict: the job is neither failed nor cancelled, and neither are its links.
        """
        with self._database.write() as session:
            row = job_row(session, job_id)
            is_done = row.state == JobState.succeeded
            if is_done and row.delete_requested_at is None and restart_links(session, row, self._clock()):
                return JobRecord.model_validate(row)
            if row.state not in (JobState.failed, JobState.cancelled):
                raise Conflict(
                    f"job {job_id} {'has' if is_done else 'is'} {row.state}; "
                    "only failed and cancelled jobs can be resumed",
                    hint="submit it again" if is_done else "wait for it",
                    job=job_id,
                )
            resume_job(session, row, self._clock())
            return JobRecord.model_validate(row)

    def requeue(
        self,
        job_id: str,
        why: str,
        *,
        attempt: int,
        fruitless_attempts: int = 0,
        error: dict[str, Any] | None = None,
        leaves_members: bool = False,
    ) -> JobRecord:
        """Put an active job back into the queue for another attempt; cancel it if it was asked to stop.

        Args:
            job_id: id of the job.
            why: reason why the job is queued again. This method appends the point from which the job continues.
            attempt: number of the attempt that is over.
            fruitless_attempts: number of consecutive attempts that ended before they committed a step.
            error: code and facts of the cause, for the event.
            leaves_members: whether members of a training job may still run; if so, the job keeps its step.

        Raises:
            NotFound: no job has this id.
            Conflict: ``attempt`` is not the job's current attempt, or the job has succeeded or is queued.
        """
        with self._database.write() as session:
            row = job_row(session, job_id)
            _require_attempt(row, attempt)
            row.fruitless_attempts = fruitless_attempts
            _again_unless_cancelled(session, row, why, self._clock(), error, leaves_members=leaves_members)
            return JobRecord.model_validate(row)

    def requeue_interrupted(
        self, why: str, *, but: Collection[str] = (), kinds: Collection[str] = ("train",)
    ) -> list[JobRecord]:
        """Requeue active jobs whose attempts were interrupted, but cancel jobs that were asked to stop.

        Members of training jobs may still run, so the jobs keep their step (see ``leaves_members`` of `requeue`).

        Args:
            why: cause of the end of the attempts, e.g. ``the server was restarted``.
            but: ids of jobs to leave out, because this server is working on them.
            kinds: only jobs of these kinds.

        Returns:
            The jobs that are queued again.
        """
        now = self._clock()
        active = JobRow.state.in_([JobState.planning.value, JobState.running.value])
        abandoned = [active, JobRow.id.not_in(but), JobRow.kind.in_(kinds)]
        with self._database.write() as session:
            rows = session.scalars(
                select(JobRow).where(*abandoned).order_by(JobRow.created_at, JobRow.id)
            ).all()
            for row in rows:
                _again_unless_cancelled(session, row, why, now, leaves_members=True)
            return [JobRecord.model_validate(row) for row in rows if row.state == JobState.queued]


def _owned(idempotency_key: str | None, owner: str | None) -> str | None:
    return None if idempotency_key is None else f"{owner or ''}:{idempotency_key}"


def _twin(session: Session, key: str | None, data: dict[str, Any]) -> JobRow | None:
    """Return the job that was created with an idempotency key, or None; raise Conflict if the job differs."""
    if key is None:
        return None
    twin = session.scalar(select(JobRow).where(JobRow.idempotency_key == key))
    if twin is not None and twin.spec != data:
        raise Conflict(
            f"this Idempotency-Key was used for job {twin.id}, which differs",
            hint="send a new key with a new job",
            job=twin.id,
        )
    return twin


def _has_tag(tag: str, database: str) -> ColumnElement[bool]:
    """Return the condition for jobs with a tag."""
    if database == "postgresql":
        return cast(JobRow.tags, JSONB).contains([tag])
    each = func.json_each(JobRow.tags).table_valued("value")
    return select(1).select_from(each).where(each.c.value == tag).exists()


def _attempt_began() -> ScalarSelect[datetime]:
    """Return a subquery for the time of the first event of a job's current attempt.

    Events of later attempts have higher numbers, so the index on (job_id, seq) suffices.
    """
    earlier = (
        select(EventRow.seq)
        .where(EventRow.job_id == JobRow.id, EventRow.attempt < JobRow.attempt)
        .order_by(EventRow.seq.desc())
        .limit(1)
        .correlate(JobRow)
        .scalar_subquery()
    )
    return (
        select(EventRow.at)
        .where(EventRow.job_id == JobRow.id, EventRow.seq > func.coalesce(earlier, 0))
        .order_by(EventRow.seq)
        .limit(1)
        .correlate(JobRow)
        .scalar_subquery()
    )


def add_job(
    session: Session,
    spec: AnyJob,
    owner: str | None,
    now: datetime,
    *,
    reason: str = "submitted",
    idempotency_key: str | None = None,
) -> JobRow:
    """Queue a job and write the event, in the caller's transaction; return its row."""
    links = spec.then.links if isinstance(spec, TrainJob) else ()
    row = JobRow(
        id=new_id("job"),
        owner=owner,
        name=spec.name,
        kind=spec.kind,
        state=JobState.queued.value,
        reason=reason,
        spec=spec.model_dump(mode="json"),
        attempt=1,
        step=0,
        total_steps=_total_steps(spec),
        created_at=now,
        idempotency_key=idempotency_key,
        tags=list(spec.tags),
        group=spec.group,
        links=first_links(links),
        has_waiting_links=bool(links),
    )
    session.add(row)
    session.flush()
    _record_event(session, row, None, now)
    return row


def _total_steps(spec: AnyJob) -> int:
    if isinstance(spec, SweepJob):
        return spec.trials
    return spec.training.steps if isinstance(spec, TrainJob) else 0


def job_row(session: Session, job_id: str) -> JobRow:
    """Return a job's row, or raise NotFound."""
    row = session.get(JobRow, job_id)
    if row is None:
        text = f"there is no job {job_id}{suggested_job(session, job_id)}"
        raise NotFound(text, hint="share-compute jobs lists them", job=job_id)
    return row


def move_job(
    session: Session,
    row: JobRow,
    state: JobState,
    reason: str,
    now: datetime,
    *,
    error: dict[str, Any] | None = None,
) -> None:
    """Change the state of a job's row and write the event, in the caller's transaction.

    If an attempt fails after the job was asked to stop, the job ends as cancelled, not failed. The job's machines are
    released unless the new state is ``planning`` or ``running``.
    """
    if state is JobState.failed and row.cancel_requested_at is not None:
        state, reason, error = JobState.cancelled, f"cancelled; its attempt ended on its own: {reason}", None
    before = JobState(row.state)
    check_transition(row.id, before, state)
    row.state, row.reason, row.error = state.value, reason, error if state is JobState.failed else None
    row.finished_at = now if state.is_final else None
    if state in (JobState.queued, JobState.succeeded):
        _unmark_trial(row)
    row.due_reports = list(row.spec.get("report", ())) if state.is_final else []
    row.has_due_reports = bool(row.due_reports)
    move_links(row, state)
    if state is JobState.running and row.started_at is None:
        row.started_at = now
    if state not in (JobState.planning, JobState.running):
        row.tokens_per_s = row.tokens_per_s if state is JobState.succeeded else None
        row.cancel_requested_at = None
        held = ContributorRow.job_id == row.id
        record_free(session, now, held)
        session.execute(update(ContributorRow).where(held).values(job_id=None))
    _record_event(session, row, before.value, now, error=error)


def resume_job(session: Session, row: JobRow, now: datetime) -> None:
    """Queue a failed or cancelled job again, in the caller's transaction."""
    row.fruitless_attempts = 0
    _again(session, row, f"resumed; continuing from {_from(row)}", now)


def ask_to_stop(session: Session, row: JobRow, now: datetime) -> None:
    """Cancel a queued job, or ask an active job to stop, in the caller's transaction."""
    if row.state == JobState.queued:
        move_job(session, row, JobState.cancelled, "cancelled before it ran", now)
    elif row.cancel_requested_at is None:
        row.cancel_requested_at = now
        add_event(session, "cancel-requested", now, {}, job=(row.id, row.attempt))


def _unmark_trial(row: JobRow) -> None:
    """Remove the mark that a sweep has stopped this trial."""
    if row.trial is not None:
        row.trial = {**row.trial, "stopped": None, "is_interrupted": False}


def _require_attempt(row: JobRow, attempt: int) -> None:
    if row.attempt != attempt:
        raise Conflict(
            f"attempt {attempt} is over: the job is {row.state} at attempt {row.attempt}",
            hint="end the attempt",
            job=row.id,
        )


def _again_unless_cancelled(
    session: Session,
    row: JobRow,
    why: str,
    now: datetime,
    error: dict[str, Any] | None = None,
    *,
    leaves_members: bool,
) -> None:
    if row.cancel_requested_at is not None:
        move_job(session, row, JobState.cancelled, f"cancelled; its attempt ended on its own: {why}", now)
        return
    if row.kind in BATCH_KINDS or row.kind == "sparse":  # no members outlive their coordinator
        _again(session, row, f"{why}; continuing from {_from(row)}", now, error)
        return
    if row.started_at is None:
        begins = "beginning"
    elif leaves_members:
        begins = f"continuing from its members' state, else from {_from(row)},"
    else:
        begins = f"continuing from {_from(row)}"
    reason = f"{why}; {begins} as soon as enough machines are ready"
    _again(session, row, reason, now, error, leaves_members=leaves_members)


def _again(
    session: Session,
    row: JobRow,
    reason: str,
    now: datetime,
    error: dict[str, Any] | None = None,
    *,
    leaves_members: bool = False,
) -> None:
    row.attempt += 1
    if not leaves_members:  # otherwise, members may still hold the last committed step
        row.step = row.checkpoint_step or 0
    row.plan = row.measured = row.proposal = None
    move_job(session, row, JobState.queued, reason, now, error=error)


def _from(row: JobRow) -> str:
    if row.kind == "sweep":
        return "its trials"
    if row.kind in BATCH_KINDS:
        return f"the {row.rows['done']} rows that are done" if row.rows else "the start"
    if row.checkpoint_step is None:
        return "the start (it has no checkpoint)"
    return f"its checkpoint of step {row.checkpoint_step}"


def _record_event(
    session: Session, row: JobRow, before: str | None, now: datetime, *, error: dict[str, Any] | None = None
) -> None:
    data = {"state": row.state, "from": before, "reason": row.reason, **({"error": error} if error else {})}
    add_event(session, "state", now, data, job=(row.id, row.attempt))
