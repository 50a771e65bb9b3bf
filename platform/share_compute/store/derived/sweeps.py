"""Sweeps and their trials: each decision is one transaction, so a restarted server continues from the rows."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from share_compute.errors import Conflict
from share_compute.lifecycle.states import JobState
from share_compute.specification import SweepJob, TrainJob, settings_of
from share_compute.store.database.database import Database
from share_compute.store.database.tables import JobRow, MetricRow
from share_compute.store.events import add_event
from share_compute.store.jobs import add_job, ask_to_stop, job_row, move_job, resume_job
from share_compute.store.records import JobRecord, RungRecord, SweepProgress, TrialJobRecord, TrialRecord

KIND = "sweep"
TRIAL_EVENT = "trial"
"""Kind of a sweep's events that report what it does with its trials."""
TRIALS_EVENT = "trials"
"""Kind of a sweep's events that report how many of its trials are over."""
_ACTIVE = (JobState.queued, JobState.planning, JobState.running)


class Sweeps:
    """Sweeps in the table of jobs, and the jobs that are their trials."""

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._clock = clock

    def active(self) -> list[JobRecord]:
        """Return the sweeps that are not over, oldest first."""
        query = (
            select(JobRow)
            .where(JobRow.kind == KIND, JobRow.state.in_([state.value for state in _ACTIVE]))
            .order_by(JobRow.created_at, JobRow.id)
        )
        with self._database.read() as session:
            return [JobRecord.model_validate(row) for row in session.scalars(query)]

    def trials(self, sweep_id: str) -> list[TrialJobRecord]:
        """Return the trials of a sweep that were started and not deleted, by number."""
        columns = [getattr(JobRow, name) for name in TrialJobRecord.model_fields]
        query = select(*columns).where(JobRow.sweep_id == sweep_id)
        with self._database.read() as session:
            found = [TrialJobRecord.model_validate(dict(row)) for row in session.execute(query).mappings()]
        return sorted(found, key=lambda job: job.trial.number)

    def progress(self, sweep_id: str) -> SweepProgress:
        """Return the part of a sweep's progress that its trials do not have.

        Raises:
            NotFound: no job has this id.
        """
        with self._database.read() as session:
            return _progress(job_row(session, sweep_id))

    def values(self, sweep_id: str, data: str, steps: Collection[int]) -> dict[str, dict[int, float]]:
        """Return {id of the trial: {step: value}} of the validations at the given steps.

        Args:
            sweep_id: id of the sweep.
            data: name of the metric in the data of a validation.
            steps: steps of the validations.
        """
        trials = select(JobRow.id).where(JobRow.sweep_id == sweep_id)
        query = select(MetricRow.job_id, MetricRow.step, MetricRow.data).where(
            MetricRow.job_id.in_(trials), MetricRow.split == "validation", MetricRow.step.in_(steps)
        )
        found: dict[str, dict[int, float]] = {}
        with self._database.read() as session:
            for job_id, step, measured in session.execute(query):
                if measured.get(data) is not None:
                    found.setdefault(job_id, {})[step] = measured[data]
        return found

    def last_values(self, sweep_id: str, data: str) -> dict[str, tuple[int, float]]:
        """Return {id of the trial: (step, value)} of the last validation of each trial that has one."""
        last = (
            select(MetricRow.job_id, func.max(MetricRow.step).label("step"))
            .join(JobRow, JobRow.id == MetricRow.job_id)
            .where(JobRow.sweep_id == sweep_id, MetricRow.split == "validation")
            .group_by(MetricRow.job_id)
            .subquery()
        )
        query = (
            select(MetricRow.job_id, MetricRow.step, MetricRow.data)
            .join(last, (last.c.job_id == MetricRow.job_id) & (last.c.step == MetricRow.step))
            .where(MetricRow.split == "validation")
        )
        with self._database.read() as session:
            rows = session.execute(query).all()
        return {job_id: (step, found[data]) for job_id, step, found in rows if found.get(data) is not None}

    def begin(self, sweep_id: str) -> JobRecord:
        """Set the state of a queued sweep to ``running``.

        Raises:
            Conflict: the sweep is not queued.
        """
        now = self._clock()
        with self._database.write() as session:
            row = job_row(session, sweep_id)
            move_job(session, row, JobState.planning, "drawing its trials", now)
            move_job(session, row, JobState.running, f"{row.total_steps} trials", now)
            _update_progress(row, began_at=now)
            row.step = _finished(session, row)
            return JobRecord.model_validate(row)

    def start(self, sweep_id: str, number: int, spec: TrainJob) -> JobRecord:
        """Queue a trial, owned by the owner of the sweep; return the trial.

        Raises:
            Conflict: the sweep does not run, was asked to stop, or has this trial already. Then nothing is changed.
        """
        with self._database.write() as session:
            row, now = self._running(session, sweep_id), self._clock()
            if number <= _progress(row).last_started:
                raise Conflict(
                    f"sweep {sweep_id} has started trial {number} already",
                    hint="draw the next one",
                    job=sweep_id,
                )
            _update_progress(row, last_started=number)
            made = add_job(session, spec, row.owner, now, reason=f"trial {number} of {sweep_id}")
            sweep = SweepJob.model_validate(row.spec)
            made.sweep_id = sweep_id
            _put(made, TrialRecord(number=number, settings=settings_of(sweep, number)))
            _record_event(session, row, made, now, "started")
            return JobRecord.model_validate(made)

    def resume(self, sweep_id: str, job_id: str) -> JobRecord:
        """Queue a trial again that was cancelled with its sweep.

        Raises:
            NotFound: no job has this id.
            Conflict: the sweep does not run, or the trial is not over.
        """
        with self._database.write() as session:
            row, now = self._running(session, sweep_id), self._clock()
            made = job_row(session, job_id)
            resume_job(session, made, now)
            _record_event(session, row, made, now, "resumed")
            return JobRecord.model_validate(made)

    def judge(self, sweep_id: str, job_id: str, rung: RungRecord, reason: str) -> None:
        """Record the comparison of a trial at a rung; if the trial is not kept, ask it to stop.

        Raises:
            NotFound: no job has this id.
        """
        with self._database.write() as session:
            row, now = job_row(session, sweep_id), self._clock()
            made = job_row(session, job_id)
            trial = _trial(made)
            if any(one.step == rung.step for one in trial.rungs):
                return
            _put(made, trial.model_copy(update={"rungs": (*trial.rungs, rung)}))
            if not rung.is_kept:
                _stop(session, row, made, reason, now)

    def stop(self, sweep_id: str, job_id: str, reason: str, *, is_interrupted: bool) -> None:
        """Ask a trial to stop; do nothing if it is over.

        Raises:
            NotFound: no job has this id.
        """
        with self._database.write() as session:
            row, now = job_row(session, sweep_id), self._clock()
            _stop(session, row, job_row(session, job_id), reason, now, is_interrupted=is_interrupted)

    def count(self, sweep_id: str) -> None:
        """Update the number of finished trials of a sweep; a call that changes nothing writes no event."""
        with self._database.write() as session:
            row = job_row(session, sweep_id)
            done = _finished(session, row)
            if done != row.step:
                row.step = done
                data = {"done": done, "total": row.total_steps}
                add_event(session, TRIALS_EVENT, self._clock(), data, job=(row.id, row.attempt))

    def finish(
        self, sweep_id: str, state: JobState, reason: str, error: dict[str, Any] | None = None
    ) -> JobRecord:
        """End a sweep.

        Raises:
            Conflict: the state machine forbids the change, for example because the sweep is over.
        """
        with self._database.write() as session:
            row, now = job_row(session, sweep_id), self._clock()
            row.step = _finished(session, row)
            _update_progress(row, past_s=_progress(row).seconds(now), began_at=None)
            move_job(session, row, state, reason, now, error=error)
            return JobRecord.model_validate(row)

    def _running(self, session: Session, sweep_id: str) -> JobRow:
        row = job_row(session, sweep_id)
        if row.state != JobState.running or row.cancel_requested_at is not None:
            raise Conflict(
                f"sweep {sweep_id} starts no trials now", hint=f"share-compute show {sweep_id}", job=sweep_id
            )
        return row


def _progress(row: JobRow) -> SweepProgress:
    return SweepProgress.model_validate(row.sweep_progress or {})


def _update_progress(row: JobRow, **changes: Any) -> None:
    row.sweep_progress = _progress(row).model_copy(update=changes).model_dump(mode="json")


def _trial(row: JobRow) -> TrialRecord:
    return TrialRecord.model_validate(row.trial)


def _put(row: JobRow, trial: TrialRecord) -> None:
    row.trial = trial.model_dump(mode="json")


def _finished(session: Session, row: JobRow) -> int:
    query = select(JobRow.state, JobRow.trial).where(JobRow.sweep_id == row.id)
    found = session.execute(query).all()
    return sum(JobState(state).is_final and not (trial or {})["is_interrupted"] for state, trial in found)


def _stop(
    session: Session, row: JobRow, made: JobRow, reason: str, now: datetime, *, is_interrupted: bool = False
) -> None:
    if JobState(made.state).is_final:
        return
    _put(made, _trial(made).model_copy(update={"stopped": reason, "is_interrupted": is_interrupted}))
    ask_to_stop(session, made, now)
    _record_event(session, row, made, now, "stopped", reason)


def _record_event(
    session: Session, row: JobRow, made: JobRow, now: datetime, what: str, reason: str | None = None
) -> None:
    trial = _trial(made)
    data = {
        "number": trial.number,
        "job": made.id,
        "what": what,
        "settings": trial.settings,
        "reason": reason,
    }
    add_event(session, TRIAL_EVENT, now, data, job=(row.id, row.attempt))
