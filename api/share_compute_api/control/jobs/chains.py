"""Starts the links of training jobs that have succeeded: deployments and batches of their results."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from share_compute.backoff import backoff_s
from share_compute.errors import Conflict, NotFound, ShareComputeError, Unavailable, as_ours
from share_compute.specification import LinkName
from share_compute.store import JobRecord, LinkState, Store
from share_compute_api.connection.notifier import Notifier
from share_compute_api.control.polling import poll_forever
from share_compute_api.submission.chains import LinkStarter

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_log = logging.getLogger(__name__)


class ChainSupervisor:
    """Starts each waiting link of a job that has succeeded, in order; a link that fails is recorded with its reason.

    If a link cannot be checked now, for example because the server is busy, its reason says so, and it is retried after
    1 s. The pause doubles with each further failure, up to 60 s.

    Args:
        store: the store of jobs and deployments.
        starter: checks and starts a link.
        notifier: signals changes in the store.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        store: Store,
        starter: LinkStarter,
        notifier: Notifier,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._starter = starter
        self._notifier = notifier
        self._clock = clock
        self._pauses: dict[tuple[str, LinkName], tuple[int, float]] = {}
        """Number of failures to check each waiting link, and the time when its pause ends."""

    async def run(self) -> None:
        """Start links until cancelled."""
        await poll_forever(self.start_due, "links of jobs", self._notifier)

    async def start_due(self) -> None:
        """Make one pass over the jobs with waiting links."""
        due = await asyncio.to_thread(self._store.chains.due)
        ids = {job.id for job in due}
        self._pauses = {key: pause for key, pause in self._pauses.items() if key[0] in ids}
        for job in due:
            await asyncio.to_thread(self._start_all, job)

    def _start_all(self, job: JobRecord) -> None:
        for link in job.links:
            if link.state is not LinkState.waiting:
                continue
            failures, until_s = self._pauses.get((job.id, link.name), (0, 0.0))
            if failures and self._clock() < until_s:
                return
            try:
                job = self._start(job, link.name)
            except Unavailable as failure:
                pause_s = backoff_s(_FIRST_PAUSE_S, failures, _LONGEST_PAUSE_S)
                self._pauses[job.id, link.name] = failures + 1, self._clock() + pause_s
                self._explain(job, link.name, failure)
                return
            except (Conflict, NotFound) as changed:
                _log.info("then.%s of job %s was changed: %s", link.name, job.id, changed.message)
                return
            self._pauses.pop((job.id, link.name), None)

    def _explain(self, job: JobRecord, name: LinkName, failure: Unavailable) -> None:
        _log.warning("then.%s of job %s is tried again: %s", name, job.id, failure.message)
        reason = f"the server cannot check it yet, and tries again: {failure.message}"
        try:
            self._store.chains.explain(job.id, name, reason)
        except (Conflict, NotFound) as changed:
            _log.info("then.%s of job %s was changed: %s", name, job.id, changed.message)

    def _start(self, job: JobRecord, name: LinkName) -> JobRecord:
        """Start a link, or record that it failed; return the job afterwards.

        Raises:
            Unavailable: the link cannot be checked now.
            Conflict: the link no longer waits.
            NotFound: the job was deleted.
        """
        try:
            return self._starter.start(job, name)
        except Unavailable:
            raise
        except ShareComputeError as problem:
            failure = problem
        except Exception as mistake:  # noqa: BLE001 - the link must not stay waiting; the log has the exception
            _log.exception("then.%s of job %s failed in the server", name, job.id)
            failure = as_ours(mistake)
        _log.warning("then.%s of job %s failed: %s", name, job.id, failure.message)
        error = {"code": failure.code, **failure.facts()}
        return self._store.chains.fail(job.id, name, failure.message, error)
