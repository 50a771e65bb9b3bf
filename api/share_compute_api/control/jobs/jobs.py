"""Runs queued training jobs on free contributors, and requeues jobs whose attempts were lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from share_compute.errors import Conflict, ShareComputeError
from share_compute.lifecycle.attempt_events import Assignment, AttemptEnded, SparseAssignment
from share_compute.planning.cost.timings import MachineTimings
from share_compute.specification import SparseJob
from share_compute.store import ContributorRecord, JobRecord, Store
from share_compute_api.connection.notifier import Notifier
from share_compute_api.control.jobs.allotting import Allotted, Allotting, allotment
from share_compute_api.control.jobs.coordinators import Attempt, Launch
from share_compute_api.control.jobs.following import Following
from share_compute_api.control.jobs.retry_policy import AttemptFailure, next_attempt
from share_compute_api.control.jobs.waiting import Waiting
from share_compute_api.control.machines.live_topology import live_topology
from share_compute_api.control.patience import Patience, patiently
from share_compute_api.control.polling import POLL_S, poll_forever

_KINDS = ("train", "sparse")
"""Kinds of jobs that this supervisor runs. Batches have their own supervisor: they need a deployment, not machines."""
_RESTARTED = "the server was restarted"
_LOST = "its attempt was lost"
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Running:
    """An attempt that this supervisor runs."""

    task: asyncio.Task[None]
    allotted: Allotted
    attempt: Attempt | None = None
    """Handle of the attempt; None until the attempt is launched."""


async def _suspend(running: _Running) -> None:
    """Make an attempt write a checkpoint, and wait until the attempt has ended."""
    if running.attempt is not None:
        with suppress(ShareComputeError):
            await running.attempt.suspend()
    await asyncio.wait([running.task])


class JobSupervisor:
    """Runs queued jobs and follows each attempt to its end. Writes each change to the store before acting on it.

    Jobs start in the order of their submission. A job that needs fewer machines may overtake a job that waits for more.
    Machines that no queued job could use are offered to running jobs.

    Args:
        store: the store of jobs and contributors.
        launch: starts an attempt.
        folder: parent folder; each job has one folder in it.
        notifier: signals changes in the store.
        patience: time limits.
        drift: relative difference between measured and predicted step times above which a job is planned again.
        checkpoint_every_s: seconds between checkpoints of jobs that set no interval; None writes no periodic
            checkpoints.
        members: returns, for each contributor, the jobs that have members there.
    """

    def __init__(
        self,
        store: Store,
        launch: Launch,
        folder: Path,
        notifier: Notifier,
        patience: Patience | None = None,
        *,
        members: Callable[[], Awaitable[Mapping[str, Collection[str]]]],
        drift: float = 0.25,
        checkpoint_every_s: float | None = None,
    ) -> None:
        self._store = store
        self._launch = launch
        self._folder = folder
        self._notifier = notifier
        self._patience = patience or Patience()
        self._drift = drift
        self._checkpoint_every_s = checkpoint_every_s
        self._members = members
        self._waiting = Waiting(self._patience)
        self._allotting = Allotting(self._patience)
        self._next_allotting_s = 0.0
        """Earliest time at which running jobs are offered machines again, on the event loop's clock."""
        self._attempts: dict[str, _Running] = {}
        self._interruption = _RESTARTED
        """Reason recorded for attempts that are active in the store but unknown to this supervisor."""
        self._is_suspended = False

    @asynccontextmanager
    async def suspended(self, within_s: float) -> AsyncIterator[int]:
        """Make all running attempts write a checkpoint and end; start no attempt inside the ``async with`` block.

        Args:
            within_s: seconds to wait for all attempts together; then the block begins, even if some attempts still run.

        Yields:
            The number of jobs that were running.
        """
        self._is_suspended = True
        try:
            running = list(self._attempts.values())
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await asyncio.gather(*map(_suspend, running))
            yield len(running)
        finally:
            self._is_suspended = False
            self._notifier.notify()

    async def run(self) -> None:
        """Run jobs until cancelled; first requeue jobs that an earlier server process left unfinished.

        While the store does not answer, running attempts continue for at most ``Patience.store_s``.
        """
        try:
            await poll_forever(self._poll, "jobs", self._notifier)
        finally:
            tasks = [running.task for running in self._attempts.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll(self) -> None:
        if self._is_suspended:
            return
        running = await self._requeue_lost()
        if not await self._queued() and not (running and self._is_time_to_allot()):
            return
        # Read the attempts before the machines. In the other order, a job that ends in between would not count as
        # running, but its machines would look leased. A queued job that needs these machines would not wait for them.
        anything_runs = bool(self._attempts)
        present = await asyncio.to_thread(self._store.contributors.list, self._waiting.states())
        # Read the queue again after the machines, because a job that was requeued in the meantime has freed machines.
        queued = await self._queued()
        # A job that was requeued during this pass starts in a later pass. Until then its machines stay reserved:
        # `present` may still list them as leased, and the job's pause is set only when its attempt's task ends.
        leased = {machine.job_id for machine in present}
        next_time = {job.id for job in queued if job.id in leased or job.id in self._attempts}
        # Read the members after the store, so that no member is missed on a machine that the store lists as free.
        members = await self._members()
        supply = self._waiting.supply(present, queued, members, anything_runs=anything_runs)
        for job in queued:
            if job.id in next_time:
                supply.take(job)
                continue
            reason = supply.why_not(job)
            if reason is None:
                machines = supply.take(job)
                if not await self._start(job, machines):
                    return  # the store changed, so the notifier triggers another pass
            elif self._waiting.pauses(job):
                # Reserve the machines during the pause, so that no later job in the queue gets them.
                supply.take(job)
            elif reason != job.reason:
                await asyncio.to_thread(self._store.jobs.explain, job.id, reason)
        if not next_time:  # otherwise the next pass decides which machines are spare
            self._allot(running, present, supply.spare(queued))

    async def _queued(self) -> list[JobRecord]:
        return await asyncio.to_thread(self._store.jobs.queued, _KINDS)

    async def _requeue_lost(self) -> list[JobRecord]:
        """Requeue active jobs that have no attempt in this process; return the other active jobs.

        A job has no attempt if an earlier server left it active, or if the end of its attempt could not be recorded.
        """
        active = await asyncio.to_thread(self._store.jobs.active, _KINDS)
        if any(job.id not in self._attempts for job in active):
            await asyncio.to_thread(
                self._store.jobs.requeue_interrupted,
                self._interruption,
                but=list(self._attempts),
                kinds=_KINDS,
            )
        self._interruption = _LOST
        return [job for job in active if job.id in self._attempts]

    def _is_time_to_allot(self) -> bool:
        """Return whether `POLL_S` seconds have passed since machines were last allotted.

        Polls are more frequent, because each committed step starts a poll.
        """
        return asyncio.get_running_loop().time() >= self._next_allotting_s

    def _allot(
        self,
        running: Sequence[JobRecord],
        present: Sequence[ContributorRecord],
        spare: Sequence[ContributorRecord],
    ) -> None:
        """Update the machines that each running attempt may use, and the machines that it must release."""
        self._next_allotting_s = asyncio.get_running_loop().time() + POLL_S
        for job_id, newest in self._allotting.allot(running, present, spare).items():
            if job_id in self._attempts:
                self._attempts[job_id].allotted.put(newest)

    async def _start(self, job: JobRecord, machines: list[ContributorRecord]) -> bool:
        try:
            job = await asyncio.to_thread(
                self._store.jobs.begin, job.id, [machine.id for machine in machines]
            )
        except Conflict as changed:
            _log.info("job %s does not begin yet: %s", job.id, changed.message)
            return False
        self._waiting.began(job)
        allotted = Allotted(allotment(machines))
        task = asyncio.create_task(self._attempt(job, machines, allotted))
        self._attempts[job.id] = _Running(task, allotted)
        task.add_done_callback(lambda ended: self._ended(job.id, ended))
        return True

    def _ended(self, job_id: str, task: asyncio.Task[None]) -> None:
        self._attempts.pop(job_id, None)
        if not task.cancelled() and (failure := task.exception()) is not None:
            _log.error("job %s: its end could not be written; it is queued again", job_id, exc_info=failure)
        self._notifier.notify()

    async def _attempt(self, job: JobRecord, machines: list[ContributorRecord], allotted: Allotted) -> None:
        following = Following(self._store, self._patience, job, allotted)
        failure: AttemptFailure | None
        try:
            known = partial(self._store.progress.timings, job.id)
            timings = await patiently(self._patience, known)
            known_step = await patiently(self._patience, partial(self._store.progress.last_step, job.id))
            attempt = await self._launch(self._assignment(job, machines, timings, known_step))
            if job.id in self._attempts:
                self._attempts[job.id].attempt = attempt
            try:
                failure = await following.follow(attempt)
            finally:
                attempt.kill()
        except ShareComputeError as lost:
            failure = AttemptFailure.noticed(lost)
        except Exception as mistake:  # noqa: BLE001 - the job must not stay running; the log has the exception
            _log.exception("job %s, attempt %d failed in the server", job.id, job.attempt)
            reason = f"internal server error: {type(mistake).__name__}"
            failure = AttemptFailure.noticed(ShareComputeError(reason, hint="look into its log", job=job.id))
        if failure is not None:
            try:
                await self._requeue_or_fail(job, machines, failure, has_committed=following.has_committed)
            except Conflict as over:
                _log.info("job %s, attempt %d is over already: %s", job.id, job.attempt, over.message)

    async def _requeue_or_fail(
        self,
        job: JobRecord,
        machines: list[ContributorRecord],
        failure: AttemptFailure,
        *,
        has_committed: bool,
    ) -> None:
        """Requeue a job whose attempt failed, or record that the job failed."""
        _log.warning("job %s, attempt %d: %s", job.id, job.attempt, failure.reason)
        again = next_attempt(job, failure, has_committed=has_committed, others_run=self._others_run(job))
        if again is None:
            ended = AttemptEnded(outcome="failed", reason=failure.reason, error=failure.error)
            await patiently(
                self._patience, partial(self._store.progress.record, job.id, job.attempt, [ended])
            )
            return
        requeue = partial(
            self._store.jobs.requeue,
            job.id,
            again.why,
            attempt=job.attempt,
            fruitless_attempts=again.fruitless_attempts,
            error=failure.error,
            leaves_members=failure.leaves_members,
        )
        queued = await patiently(self._patience, requeue)
        if again.needs_others:
            self._waiting.tried(queued, machines)
        elif again.pauses:
            self._waiting.pause(queued)

    def _others_run(self, job: JobRecord) -> bool:
        return any(other != job.id for other in self._attempts)

    def _assignment(
        self,
        job: JobRecord,
        machines: list[ContributorRecord],
        timings: dict[str, MachineTimings],
        known_step: int,
    ) -> Assignment | SparseAssignment:
        folder = self._folder / job.id
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(job.spec, SparseJob):
            return SparseAssignment(
                job_id=job.id,
                attempt=job.attempt,
                spec=job.spec,
                topology=live_topology(machines),
                folder=folder,
                checkpoint_every_s=self._checkpoint_every_s,
            )
        return Assignment(
            job_id=job.id,
            attempt=job.attempt,
            spec=job.training.without_links(),
            topology=live_topology(machines, job.selection.ranks),
            folder=folder,
            checkpoint=job.checkpoint_path,
            known_step=known_step,
            drift=self._drift,
            checkpoint_every_s=self._checkpoint_every_s,
            timings=timings,
            has_run=job.started_at is not None,
        )
