"""Runs queued jobs: each on the ready contributors that no other job holds."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

from share_compute.errors import Conflict, ShareComputeError
from share_compute.jobs.events import Assignment
from share_compute.store import ContributorRecord, JobRecord, Store
from share_compute_api.bell import Bell
from share_compute_api.supervision.coordinators import Launch
from share_compute_api.supervision.following import Following, TooFew
from share_compute_api.supervision.live_topology import live_topology
from share_compute_api.supervision.patience import Patience, patiently
from share_compute_api.supervision.waiting import Waiting

_LOOK_S = 1.0
_RESTARTED = "the server was restarted"
_LOST = "its attempt was lost"
_log = logging.getLogger(__name__)


class JobSupervisor:
    """Takes queued jobs and follows each attempt to its end. Rows first, effects after.

    Jobs begin in the order they came, except that one which needs fewer machines may pass one that waits for more.

    Args:
        store: where jobs are.
        launch: starts an attempt.
        folder: holds one folder for each job.
        bell: rings when the store changed.
        patience: how long to wait for what.
        drift: share by which measured step times may differ from predicted ones before a job is planned again.
    """

    def __init__(
        self,
        store: Store,
        launch: Launch,
        folder: Path,
        bell: Bell,
        patience: Patience | None = None,
        *,
        drift: float = 0.25,
    ) -> None:
        self._store = store
        self._launch = launch
        self._folder = folder
        self._bell = bell
        self._patience = patience or Patience()
        self._drift = drift
        self._waiting = Waiting(self._patience)
        self._attempts: dict[str, asyncio.Task[None]] = {}
        self._interruption = _RESTARTED
        """What happened to attempts that the store knows and this supervisor does not."""

    async def run(self) -> None:
        """Run jobs until cancelled; begins by queueing again what an earlier server left unfinished.

        While the store does not answer, what runs goes on.
        """
        try:
            while True:
                ticket = self._bell.ticket
                try:
                    await self._look()
                except ShareComputeError as failure:
                    _log.warning("jobs could not be looked at: %s", failure.message)
                await self._bell.wait(ticket, _LOOK_S)
        finally:
            tasks = list(self._attempts.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        await self._requeue_lost()
        queued = [
            job for job in await asyncio.to_thread(self._store.jobs.queued) if job.id not in self._attempts
        ]
        if not queued:
            return
        present = await asyncio.to_thread(self._store.contributors.list, self._waiting.states())
        pool = self._waiting.look(present, queued, anything_runs=bool(self._attempts))
        for job in queued:
            reason = pool.why_not(job)
            if reason is None:
                machines = pool.take()
                if not await self._start(job, machines):
                    return  # something changed, so the bell rang: look again
            elif reason != job.reason:
                await asyncio.to_thread(self._store.jobs.explain, job.id, reason)

    async def _requeue_lost(self) -> None:
        """Whatever is active without an attempt of ours: its server stopped, or its end could not be written."""
        active = await asyncio.to_thread(self._store.jobs.active)
        if any(job.id not in self._attempts for job in active):
            await asyncio.to_thread(
                self._store.jobs.requeue_interrupted, self._interruption, but=list(self._attempts)
            )
        self._interruption = _LOST

    async def _start(self, job: JobRecord, machines: list[ContributorRecord]) -> bool:
        try:
            job = await asyncio.to_thread(
                self._store.jobs.begin, job.id, [machine.id for machine in machines]
            )
        except Conflict as changed:
            _log.info("job %s does not begin yet: %s", job.id, changed.message)
            return False
        task = asyncio.create_task(self._attempt(job, machines))
        self._attempts[job.id] = task
        task.add_done_callback(lambda ended: self._ended(job.id, ended))
        return True

    def _ended(self, job_id: str, task: asyncio.Task[None]) -> None:
        self._attempts.pop(job_id, None)
        if not task.cancelled() and (failure := task.exception()) is not None:
            _log.error("job %s: its end could not be written; it is queued again", job_id, exc_info=failure)
        self._bell.ring()

    async def _attempt(self, job: JobRecord, machines: list[ContributorRecord]) -> None:
        following = Following(self._store, self._patience, others_run=lambda: self._others_run(job))
        try:
            attempt = await self._launch(self._assignment(job, machines))
            try:
                await following.follow(job, attempt)
            finally:
                attempt.kill()
        except TooFew as failure:
            again = await patiently(
                self._patience,
                partial(self._store.jobs.requeue, job.id, failure.reason, attempt=job.attempt),
            )
            self._waiting.too_few(again, machines)
        except ShareComputeError as failure:
            _log.warning("job %s, attempt %d: %s", job.id, job.attempt, failure.message)
            await following.fail(job, failure)
        except Exception as failure:  # noqa: BLE001 - the job must not stay running for ever, and the log has it
            _log.exception("job %s, attempt %d failed in the server", job.id, job.attempt)
            mistake = ShareComputeError(
                f"the server made a mistake: {type(failure).__name__}", mend="look into its log", job=job.id
            )
            await following.fail(job, mistake)

    def _others_run(self, job: JobRecord) -> bool:
        return any(other != job.id for other in self._attempts)

    def _assignment(self, job: JobRecord, machines: list[ContributorRecord]) -> Assignment:
        folder = self._folder / job.id
        folder.mkdir(parents=True, exist_ok=True)
        return Assignment(
            job_id=job.id,
            attempt=job.attempt,
            spec=job.spec,
            topology=live_topology(machines),
            folder=folder,
            checkpoint=job.checkpoint_path,
            drift=self._drift,
        )
