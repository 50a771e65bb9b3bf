"""Runs sweeps: starts their trials as jobs, compares them, and stops trials that are worse than others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from share_compute.errors import Conflict, NotFound, ShareComputeError, Unavailable, as_ours
from share_compute.lifecycle.states import JobState
from share_compute.lifecycle.sweeps import (
    FinishSweep,
    JudgeTrial,
    ResumeTrial,
    StartTrial,
    StopTrial,
    SweepEffect,
    Trial,
    decide,
    rungs_of,
)
from share_compute.specification.task import data_name
from share_compute.store import JobRecord, RungRecord, Store, TrialJobRecord
from share_compute_api.connection.notifier import Notifier
from share_compute_api.control.polling import poll_forever
from share_compute_api.submission.sweeps import TrialStarter

_FAILED = "the sweep failed"
_log = logging.getLogger(__name__)


class SweepSupervisor:
    """Runs sweeps. All state is in the store, so a restarted server continues with the next pass.

    Args:
        store: the store of jobs.
        starter: checks and starts trials.
        notifier: signals changes in the store.
    """

    def __init__(self, store: Store, starter: TrialStarter, notifier: Notifier) -> None:
        self._store = store
        self._starter = starter
        self._notifier = notifier

    async def run(self) -> None:
        """Run sweeps until cancelled."""
        await poll_forever(self.poll, "sweeps", self._notifier)

    async def poll(self) -> None:
        """Make one pass over the sweeps that are not over."""
        for sweep in await asyncio.to_thread(self._store.sweeps.active):
            await asyncio.to_thread(self._advance, sweep)

    def _advance(self, sweep: JobRecord) -> None:
        try:
            if sweep.state is JobState.queued:
                sweep = self._store.sweeps.begin(sweep.id)
            # Read trials before their values, so that all values of a finished trial are read.
            jobs = self._store.sweeps.trials(sweep.id)
            if sum(_is_over(job) for job in jobs) != sweep.step:
                self._store.sweeps.count(sweep.id)
            for effect in self._decide(sweep, jobs):
                self._apply_if_possible(sweep, effect)
        except (Conflict, NotFound) as changed:
            _log.info("sweep %s was changed: %s", sweep.id, changed.message)
        except Unavailable as failure:
            _log.warning("sweep %s is tried again: %s", sweep.id, failure.message)
        except ShareComputeError as failure:
            self._fail(sweep, failure)
        except Exception as mistake:  # noqa: BLE001 - the sweep must not stay running; the log has the exception
            _log.exception("sweep %s failed in the server", sweep.id)
            self._fail(sweep, as_ours(mistake))

    def _decide(self, sweep: JobRecord, jobs: Sequence[TrialJobRecord]) -> list[SweepEffect]:
        spec = sweep.sweep
        name = data_name(spec.metric)
        last = self._store.sweeps.last_values(sweep.id, name)
        rungs = rungs_of(spec)
        values = self._store.sweeps.values(sweep.id, name, rungs) if rungs else {}
        trials = [_trial(job, values.get(job.id, {}), has_result=job.id in last) for job in jobs]
        progress = self._store.sweeps.progress(sweep.id)
        return decide(
            spec,
            trials,
            last_started=progress.last_started,
            seconds=progress.seconds(self._store.clock()),
            is_cancelled=sweep.cancel_requested_at is not None,
        )

    def _apply_if_possible(self, sweep: JobRecord, effect: SweepEffect) -> None:
        """Apply an effect, unless its trial has changed since the decision; other effects are still applied then."""
        try:
            self._apply(sweep, effect)
        except (Conflict, NotFound) as changed:
            _log.info("sweep %s: %s is not possible any more: %s", sweep.id, effect, changed.message)

    def _apply(self, sweep: JobRecord, effect: SweepEffect) -> None:
        sweeps = self._store.sweeps
        match effect:
            case StartTrial(number=number):
                self._starter.start(sweep, number)
            case ResumeTrial(job_id=job_id):
                self._starter.resume(sweep, job_id)
            case JudgeTrial():
                rung = RungRecord(step=effect.step, value=effect.value, is_kept=effect.is_kept)
                sweeps.judge(sweep.id, effect.job_id, rung, effect.reason)
            case StopTrial():
                sweeps.stop(sweep.id, effect.job_id, effect.reason, is_interrupted=effect.is_interrupted)
            case FinishSweep():
                sweeps.finish(sweep.id, effect.state, effect.reason)

    def _fail(self, sweep: JobRecord, failure: ShareComputeError) -> None:
        """Stop the trials, and record that the sweep failed."""
        _log.warning("sweep %s failed: %s", sweep.id, failure.message)
        for job in self._store.sweeps.trials(sweep.id):
            self._store.sweeps.stop(sweep.id, job.id, _FAILED, is_interrupted=True)
        error = {"code": failure.code, **failure.facts()}
        self._store.sweeps.finish(sweep.id, JobState.failed, failure.message, error)


def _is_over(job: TrialJobRecord) -> bool:
    """Return whether a trial is over, and will not continue with its sweep."""
    return job.state.is_final and not job.trial.is_interrupted


def _trial(job: TrialJobRecord, values: dict[int, float], *, has_result: bool) -> Trial:
    trial = job.trial
    return Trial(
        number=trial.number,
        job_id=job.id,
        state=job.state,
        steps=job.total_steps,
        judged={rung.step: rung.value for rung in trial.rungs},
        values=values,
        is_stopped=trial.stopped is not None,
        has_lost=any(not rung.is_kept for rung in trial.rungs),
        is_interrupted=trial.is_interrupted,
        has_result=has_result,
    )
