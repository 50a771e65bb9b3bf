"""Runs queued batches: starts a batch when its deployment can answer, and requeues batches whose attempts were lost."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

from share_compute.errors import Conflict, NotFound, ShareComputeError, UserError, as_ours
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.states import JobState
from share_compute.specification import BATCH_KINDS, BatchJob, SparseJob, SweepJob, TrainJob
from share_compute.store import DeploymentRecord, JobRecord, Store
from share_compute_api.connection.notifier import Notifier
from share_compute_api.control.patience import Patience, patiently
from share_compute_api.control.polling import poll_forever
from share_compute_api.openai.engine import Engines
from share_compute_api.submission.batches import deployment_of, require_kind

_RESTARTED = "the server was restarted"
_LOST = "its attempt was lost"
_ANSWERING = (DeploymentState.ready, DeploymentState.degraded)
_log = logging.getLogger(__name__)


class BatchSupervisor:
    """Runs queued batches. Writes each change to the store before acting on it.

    A batch that names a deployment waits until a deployment of that name is up; if the deployment is taken down, the
    batch waits again. The batch of a training job's link is bound to one deployment, and fails when that deployment
    ends. For a batch that names a model, the supervisor creates a deployment, and takes it down when the batch has
    ended.

    Args:
        store: the store of jobs and deployments.
        engines: the engines of the served models.
        folder: parent folder; each job has one folder in it.
        notifier: signals changes in the store.
    """

    def __init__(self, store: Store, engines: Engines, folder: Path, notifier: Notifier) -> None:
        self._store = store
        self._engines = engines
        self._folder = folder
        self._notifier = notifier
        self._patience = Patience()
        self._attempts: dict[str, asyncio.Task[None]] = {}
        self._deployed: dict[str, tuple[int, str]] = {}
        """Job id -> (attempt number, deployment id) of the last deployment that was created for the batch."""
        self._interruption = _RESTARTED
        """Reason recorded for attempts that are active in the store but unknown to this supervisor."""

    async def run(self) -> None:
        """Run batches until cancelled; first requeue batches that an earlier server process left unfinished."""
        try:
            await poll_forever(self._poll, "batches", self._notifier)
        finally:
            tasks = list(self._attempts.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll(self) -> None:
        requeue = partial(
            self._store.jobs.requeue_interrupted,
            self._interruption,
            but=list(self._attempts),
            kinds=BATCH_KINDS,
        )
        active = await asyncio.to_thread(self._store.jobs.active, BATCH_KINDS)
        if any(job.id not in self._attempts for job in active):
            await asyncio.to_thread(requeue)
        self._interruption = _LOST
        for job in await asyncio.to_thread(self._store.jobs.queued, BATCH_KINDS):
            if job.id not in self._attempts:
                try:
                    await self._consider(job)
                except Conflict as changed:
                    _log.info("batch %s does not begin yet: %s", job.id, changed.message)
                except UserError as failure:
                    await self._fail(job, failure)
        await self._take_down()

    # -- beginning ---------------------------------------------------------------------------------------------------

    async def _consider(self, job: JobRecord) -> None:
        """Start a batch if its deployment can answer now; else record the reason of the wait.

        Raises:
            Conflict: the batch is no longer queued.
            UserError: the batch's own deployment, or the one to which it is bound, has ended, or the deployment serves
                another kind of model.
        """
        spec = _batch(job)
        name = spec.deployment or job.id
        record = await asyncio.to_thread(self._named, job, name)
        if record is None and spec.model is not None:
            record = await asyncio.to_thread(self._deploy, job, spec)
        engine = self._engines.find(name)
        if record is None:
            reason = f"waiting for deployment {name}: nothing of this name is up"
        elif engine is None or not _answers(record):
            reason = f"waiting for deployment {name}: it is {record.state.value}, {record.reason}"
        else:
            require_kind(spec, engine.facts.kind)
            await self._begin(job, spec, record)
            return
        if reason != job.reason:
            await asyncio.to_thread(self._store.jobs.explain, job.id, reason)

    def _named(self, job: JobRecord, name: str) -> DeploymentRecord | None:
        """Return the live deployment that a batch names; None if there is none.

        Raises:
            UserError: the batch is bound to a deployment that has ended.
        """
        record = self._store.deployments.by_name(name)
        bound = self._store.chains.deployment_of(job.id)
        if bound is not None and (record is None or record.id != bound):
            raise UserError(
                f"the deployment of the result, {name} ({bound}), is over",
                hint="serve the result again, and submit the rows as a batch that names the new deployment",
                job=job.id,
            )
        return record

    def _deploy(self, job: JobRecord, spec: BatchJob) -> DeploymentRecord:
        """Create and return the batch's own deployment for the current attempt.

        Raises:
            UserError: a deployment was already created for this attempt, and it was stopped or failed.
        """
        attempt, made = self._deployed.get(job.id, (0, ""))
        if attempt == job.attempt:
            over = self._store.deployments.get(made)
            hint = (over.error or {}).get("hint") or f"share-compute resume {job.id} deploys it again"
            raise UserError(f"its deployment is {over.state.value}: {over.reason}", hint=hint, job=job.id)
        wanted = deployment_of(job.id, spec)
        record = self._store.deployments.create(wanted, reason=f"for batch {job.id}", owner=job.owner)
        self._deployed[job.id] = job.attempt, record.id
        return record

    async def _begin(self, job: JobRecord, spec: BatchJob, deployment: DeploymentRecord) -> None:
        job = await asyncio.to_thread(self._store.jobs.begin, job.id, (), "reading its rows")
        task = asyncio.create_task(self._attempt(job, spec, deployment))
        self._attempts[job.id] = task
        task.add_done_callback(lambda ended: self._ended(job.id, ended))

    def _ended(self, job_id: str, task: asyncio.Task[None]) -> None:
        self._attempts.pop(job_id, None)
        if not task.cancelled() and (failure := task.exception()) is not None:
            _log.error("batch %s: its end could not be written; it is queued again", job_id, exc_info=failure)
        self._notifier.notify()

    # -- an attempt --------------------------------------------------------------------------------------------------

    async def _attempt(self, job: JobRecord, spec: BatchJob, deployment: DeploymentRecord) -> None:
        # This import is slow, and all streams wait for a restarted server, so it runs only when needed.
        from share_compute_api.control.batches.attempt import BatchAttempt, DeploymentGone

        folder = self._folder / job.id
        attempt = BatchAttempt(self._store, self._engines, job, spec, deployment, folder)
        try:
            await attempt.run()
        except DeploymentGone:
            await self._requeue_or_fail(job, spec, deployment)
        except Conflict as over:
            _log.info("batch %s, attempt %d is over already: %s", job.id, job.attempt, over.message)
        except ShareComputeError:
            raise
        except Exception as mistake:  # noqa: BLE001 - the job must not stay running; the log has the exception
            _log.exception("batch %s, attempt %d failed in the server", job.id, job.attempt)
            await self._fail(job, as_ours(mistake))

    async def _requeue_or_fail(self, job: JobRecord, spec: BatchJob, deployment: DeploymentRecord) -> None:
        """Requeue a batch whose deployment is gone; if the deployment was created for this batch, fail the batch."""
        if spec.model is None:
            why = f"deployment {deployment.name} is gone"
            requeue = partial(self._store.jobs.requeue, job.id, why, attempt=job.attempt)
            await patiently(self._patience, requeue)
            return
        over = await patiently(self._patience, partial(self._store.deployments.get, deployment.id))
        hint = f"share-compute resume {job.id} deploys it again"
        reason = f"its deployment is {over.state.value}: {over.reason}"
        await self._fail(job, UserError(reason, hint=hint, job=job.id))

    async def _fail(self, job: JobRecord, failure: ShareComputeError) -> None:
        error = {"code": failure.code, **failure.facts()}
        move = partial(
            self._store.jobs.move,
            job.id,
            JobState.failed,
            failure.message,
            attempt=job.attempt,
            error=error,
        )
        await patiently(self._patience, move)

    # -- afterwards --------------------------------------------------------------------------------------------------

    async def _take_down(self) -> None:
        """Take down each deployment that was created for a batch that has ended."""
        for record in await asyncio.to_thread(self._store.deployments.list):
            if await asyncio.to_thread(self._is_left, record):
                await asyncio.to_thread(self._store.deployments.stop, record.id, "its batch is over")

    def _is_left(self, record: DeploymentRecord) -> bool:
        try:
            job = self._store.jobs.get(record.name)
        except NotFound:
            return False
        if (
            isinstance(job.spec, TrainJob | SparseJob | SweepJob)
            or job.spec.model is None
            or not job.state.is_final
        ):
            return False
        made = deployment_of(job.id, job.spec)
        # Users can change the number of replicas, so it is not compared.
        return record.spec.model_copy(update={"replicas": made.replicas}) == made


def _answers(record: DeploymentRecord) -> bool:
    """Return whether a deployment accepts rows now.

    A deployment that may scale to zero always accepts rows, because a row starts a replica.
    """
    return record.state in _ANSWERING or record.spec.replicas.min == 0


def _batch(job: JobRecord) -> BatchJob:
    assert not isinstance(job.spec, TrainJob | SparseJob | SweepJob)
    return job.spec
