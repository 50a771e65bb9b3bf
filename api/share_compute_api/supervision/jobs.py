"""Runs queued jobs: each on the ready contributors that no other job holds."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from share_compute.errors import Conflict, PlanInfeasible, ShareComputeError
from share_compute.jobs.events import Assignment, AttemptEnded, AttemptEvent
from share_compute.jobs.states import ContributorState, JobState
from share_compute.store import ContributorRecord, JobRecord, Store
from share_compute.topology import Topology
from share_compute_api.bell import Bell
from share_compute_api.supervision.coordinators import Attempt, Launch

_POLL_S = 1.0
"""Longest wait for an attempt's next event; also how soon a wish to cancel is noticed."""
_LOOK_S = 1.0
_CANCEL_TIMEOUT_S = 30.0
_log = logging.getLogger(__name__)


class JobSupervisor:
    """Takes queued jobs in order and follows each attempt to its end. Rows first, effects after.

    Args:
        store: where jobs are.
        launch: starts an attempt.
        folder: holds one folder for each job.
        bell: rings when the store changed.
    """

    def __init__(self, store: Store, launch: Launch, folder: Path, bell: Bell) -> None:
        self._store = store
        self._launch = launch
        self._folder = folder
        self._bell = bell
        self._attempts: dict[str, asyncio.Task[None]] = {}
        self._too_few: dict[str, frozenset[str]] = {}
        """Contributors that were offered to a job and could not hold it, so that it waits for others."""

    async def run(self) -> None:
        """Run jobs until cancelled; begins by queueing again what an earlier server left unfinished."""
        await asyncio.to_thread(self._store.jobs.requeue_interrupted)
        try:
            while True:
                ticket = self._bell.ticket
                await self._start_queued()
                await self._bell.wait(ticket, _LOOK_S)
        finally:
            tasks = list(self._attempts.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_queued(self) -> None:
        queued = [
            job for job in await asyncio.to_thread(self._store.jobs.queued) if job.id not in self._attempts
        ]
        if not queued:
            return
        ready = await asyncio.to_thread(self._store.contributors.list, [ContributorState.ready])
        free = [machine for machine in ready if machine.job_id is None]
        for job in queued:
            offered = frozenset(machine.id for machine in free)
            if not offered:
                await asyncio.to_thread(self._store.jobs.explain, job.id, _waiting(job))
            elif offered != self._too_few.get(job.id):
                await self._start(job, free)
                free = []

    async def _start(self, job: JobRecord, machines: list[ContributorRecord]) -> None:
        try:
            job = await asyncio.to_thread(
                self._store.jobs.begin, job.id, [machine.id for machine in machines]
            )
        except Conflict:  # cancelled at this moment
            return
        task = asyncio.create_task(self._attempt(job, machines))
        self._attempts[job.id] = task
        task.add_done_callback(lambda _: self._ended(job.id))

    def _ended(self, job_id: str) -> None:
        self._attempts.pop(job_id, None)
        self._bell.ring()

    async def _attempt(self, job: JobRecord, machines: list[ContributorRecord]) -> None:
        try:
            attempt = await self._launch(self._assignment(job, machines))
            try:
                await self._follow(job, attempt, machines)
            finally:
                attempt.kill()
        except ShareComputeError as failure:
            _log.warning("job %s, attempt %d: %s", job.id, job.attempt, failure.message)
            await self._fail(job, failure)
        except Exception as failure:  # noqa: BLE001 - the job must not stay running for ever, and the log has it
            _log.exception("job %s, attempt %d failed in the server", job.id, job.attempt)
            await self._fail(
                job,
                ShareComputeError(
                    f"the server made a mistake: {type(failure).__name__}",
                    mend="look into its log",
                    job=job.id,
                ),
            )

    async def _follow(self, job: JobRecord, attempt: Attempt, machines: list[ContributorRecord]) -> None:
        received = 0
        deadline: float | None = None
        clock = asyncio.get_running_loop().time
        while True:
            events = await attempt.events(received, _POLL_S)
            received += len(events)
            last = events[-1] if events else None
            if isinstance(last, AttemptEnded) and self._must_wait(job, last):
                await self._wait_for_others(job, events[:-1], last, machines)
                return
            if events:
                job = await asyncio.to_thread(self._store.progress.record, job.id, job.attempt, events)
            else:
                job = await asyncio.to_thread(self._store.jobs.get, job.id)
            if job.state.is_final:
                return
            if job.cancel_requested_at is not None and deadline is None:
                deadline = clock() + _CANCEL_TIMEOUT_S
                await attempt.cancel()
            if deadline is not None and clock() > deadline:
                reason = f"cancelled; it did not stop within {_CANCEL_TIMEOUT_S:.0f} s and was ended"
                await asyncio.to_thread(self._store.jobs.move, job.id, JobState.cancelled, reason)
                return

    def _must_wait(self, job: JobRecord, ended: AttemptEnded) -> bool:
        """Whether the job does not fit only because other jobs hold machines."""
        too_large = ended.outcome == "failed" and (ended.error or {}).get("code") == PlanInfeasible.code
        return too_large and any(other != job.id for other in self._attempts)

    async def _wait_for_others(
        self,
        job: JobRecord,
        events: list[AttemptEvent],
        ended: AttemptEnded,
        machines: list[ContributorRecord],
    ) -> None:
        self._too_few[job.id] = frozenset(machine.id for machine in machines)
        await asyncio.to_thread(self._store.progress.record, job.id, job.attempt, events)
        reason = f"waiting for contributors that other jobs hold: {ended.reason}"
        await asyncio.to_thread(self._store.jobs.requeue, job.id, reason)

    async def _fail(self, job: JobRecord, failure: ShareComputeError) -> None:
        error = {"code": failure.code, "message": failure.message, **failure.facts()}
        try:
            await asyncio.to_thread(
                self._store.jobs.move, job.id, JobState.failed, failure.message, error=error
            )
        except Conflict:
            _log.info("job %s is over already", job.id)

    def _assignment(self, job: JobRecord, machines: list[ContributorRecord]) -> Assignment:
        folder = self._folder / job.id
        folder.mkdir(parents=True, exist_ok=True)
        offered = {machine.id for machine in machines} | {"head"}
        return Assignment(
            job_id=job.id,
            attempt=job.attempt,
            spec=job.spec,
            topology=Topology(
                contributors=tuple(machine.machine() for machine in machines),
                links=tuple(
                    link
                    for machine in machines
                    for link in machine.links or ()
                    if link.source in offered and link.target in offered
                ),
            ),
            folder=folder,
            checkpoint=job.checkpoint_path,
        )


def _waiting(job: JobRecord) -> str:
    if job.checkpoint_step is None:
        return "waiting for contributors"
    return f"waiting for contributors; continues from step {job.checkpoint_step}"
