"""Follows one attempt at a job: writes what it tells, and sees to it that it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from share_compute.errors import Conflict, PlanInfeasible, ShareComputeError, Unavailable
from share_compute.jobs.events import AttemptEnded, AttemptEvent
from share_compute.jobs.states import JobState
from share_compute.store import JobRecord, Store
from share_compute_api.supervision.coordinators import Attempt
from share_compute_api.supervision.patience import Patience, patiently

_POLL_S = 1.0
"""Longest wait for an attempt's next event; also how soon a wish to cancel is noticed."""
_log = logging.getLogger(__name__)


class TooFew(Exception):
    """The job does not fit, but might when other jobs give their machines back."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Following:
    """Follows attempts.

    Args:
        store: where jobs are.
        patience: how long to wait for an attempt.
        others_run: whether other jobs hold machines right now.
    """

    def __init__(self, store: Store, patience: Patience, others_run: Callable[[], bool]) -> None:
        self._store = store
        self._patience = patience
        self._others_run = others_run

    async def follow(self, job: JobRecord, attempt: Attempt) -> None:
        """Return when the job is over.

        Raises:
            TooFew: it does not fit beside the other jobs.
            ShareComputeError: the attempt is lost, or the store does not answer.
        """
        # Beside each other, because an attempt that does not answer must still be ended when that is wished.
        tasks = [
            asyncio.create_task(self._write_events(job, attempt)),
            asyncio.create_task(self._heed_wish(job, attempt)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def fail(self, job: JobRecord, failure: ShareComputeError) -> None:
        """Write down that the attempt failed; does nothing when it is over already."""
        error = {"code": failure.code, "message": failure.message, **failure.facts()}
        try:
            await self._move(job, JobState.failed, failure.message, error)
        except Conflict as over:
            _log.info("job %s, attempt %d is over already: %s", job.id, job.attempt, over.message)

    async def _write_events(self, job: JobRecord, attempt: Attempt) -> None:
        received = 0
        while not job.state.is_final:
            try:
                async with asyncio.timeout(self._patience.answer_s):
                    events = await attempt.events(received, _POLL_S)
            except TimeoutError as silence:
                raise Unavailable(
                    "the coordinator does not answer", mend=f"share-compute resume {job.id}", job=job.id
                ) from silence
            received += len(events)
            too_few = self._too_few(job, events)
            if too_few is not None:
                events = events[:-1]
            if events:
                record = partial(self._store.progress.record, job.id, job.attempt, events)
                job = await patiently(self._patience, record)
            if too_few is not None:
                raise too_few

    def _too_few(self, job: JobRecord, events: list[AttemptEvent]) -> TooFew | None:
        """Whether the job does not fit only because other jobs hold machines."""
        ended = events[-1] if events else None
        if not isinstance(ended, AttemptEnded) or ended.outcome != "failed" or not self._others_run():
            return None
        if (ended.error or {}).get("code") != PlanInfeasible.code:
            return None
        _log.info("job %s waits for machines of other jobs: %s", job.id, ended.reason)
        return TooFew(f"waiting for contributors that other jobs hold: {ended.reason}")

    async def _heed_wish(self, job: JobRecord, attempt: Attempt) -> None:
        """Wait for a wish to cancel, pass it on, and end the attempt when it does not stop by itself."""
        look = partial(self._store.jobs.get, job.id)
        while (await patiently(self._patience, look)).cancel_requested_at is None:  # noqa: ASYNC110 - the wish is a row
            await asyncio.sleep(_POLL_S)
        deadline = asyncio.get_running_loop().time() + self._patience.cancel_s
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await attempt.cancel()
        await asyncio.sleep(deadline - asyncio.get_running_loop().time())
        reason = f"cancelled; it did not stop within {self._patience.cancel_s:.0f} s and was ended"
        await self._move(job, JobState.cancelled, reason)

    async def _move(
        self, job: JobRecord, state: JobState, reason: str, error: dict[str, Any] | None = None
    ) -> None:
        move = partial(self._store.jobs.move, job.id, state, reason, attempt=job.attempt, error=error)
        await patiently(self._patience, move)
