"""Follows one attempt at a job: records its events, and forwards machine changes and cancellations."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial

from share_compute.errors import ContributorLost, ShareComputeError
from share_compute.lifecycle.attempt_events import AttemptEnded, AttemptEvent, Offer, StepCommitted
from share_compute.lifecycle.states import JobState
from share_compute.store import JobRecord, Store
from share_compute_api.control.jobs.allotting import Allotted
from share_compute_api.control.jobs.coordinators import Attempt
from share_compute_api.control.jobs.retry_policy import AttemptFailure
from share_compute_api.control.machines.live_topology import live_topology
from share_compute_api.control.patience import Patience, patiently

_POLL_S = 1.0
"""Longest wait for an attempt's next event, in seconds; also the longest delay until a cancellation request is noticed.
"""
_log = logging.getLogger(__name__)


class Following:
    """Records an attempt's events; forwards changes of its machines and a cancellation request to the attempt.

    Args:
        store: the store of jobs.
        patience: time limits for the attempt and the store.
        job: the job at the beginning of the attempt.
        allotted: machines that the attempt may use.
    """

    def __init__(self, store: Store, patience: Patience, job: JobRecord, allotted: Allotted) -> None:
        self._store = store
        self._patience = patience
        self._job = job
        self._allotted = allotted
        self.has_committed = False
        """Whether the attempt has committed a step."""

    async def follow(self, attempt: Attempt) -> AttemptFailure | None:
        """Follow the attempt to its end; return its failure, which the caller records, or None if the job has ended.

        Raises:
            ShareComputeError: the attempt is lost, or the store does not answer.
        """
        # The tasks are separate, so that a cancellation takes effect even if the attempt does not answer.
        tasks = [
            asyncio.create_task(self._write_events(attempt)),
            asyncio.create_task(self._forward_cancellation(attempt)),
            asyncio.create_task(self._pass_on(attempt)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            failures = [task.result() for task in done]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return next(filter(None, failures), None)

    async def _write_events(self, attempt: Attempt) -> AttemptFailure | None:
        received = 0
        while True:
            try:
                async with asyncio.timeout(self._patience.answer_s):
                    events = await attempt.events(received, _POLL_S)
            except TimeoutError as timeout:
                raise ContributorLost(
                    "the job's coordinator does not answer",
                    hint=f"share-compute resume {self._job.id}",
                    job=self._job.id,
                ) from timeout
            received += len(events)
            failure = _failure(events)
            if failure is not None:
                events = events[:-1]
            if events:
                record = partial(self._store.progress.record, self._job.id, self._job.attempt, events)
                self._job = await patiently(self._patience, record)
                self.has_committed |= any(isinstance(event, StepCommitted) for event in events)
            if failure is not None or self._job.state.is_final:
                return failure

    async def _forward_cancellation(self, attempt: Attempt) -> None:
        """Wait for a cancellation request and forward it to the attempt.

        If the attempt does not stop in time, record the job as cancelled; the caller of `follow` then kills the
        attempt.
        """
        job_id, number = self._job.id, self._job.attempt
        read = partial(self._store.jobs.get, job_id)
        while (await patiently(self._patience, read)).cancel_requested_at is None:  # noqa: ASYNC110 - polls a row
            await asyncio.sleep(_POLL_S)
        deadline = asyncio.get_running_loop().time() + self._patience.cancel_s
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await attempt.cancel()
        await asyncio.sleep(deadline - asyncio.get_running_loop().time())
        reason = f"cancelled; it did not stop within {self._patience.cancel_s:.0f} s and was ended"
        move = partial(self._store.jobs.move, job_id, JobState.cancelled, reason, attempt=number)
        await patiently(self._patience, move)

    async def _pass_on(self, attempt: Attempt) -> None:
        """Send the attempt each change in the machines that it may use or must release."""
        assigned = self._allotted.assigned
        while True:
            wanted = await self._allotted.other_than(assigned)
            try:
                for contributor_id in sorted(wanted.leaving - assigned.leaving):
                    await attempt.drain(contributor_id)
                if (wanted.nodes, wanted.answers) != (assigned.nodes, assigned.answers):
                    topology = live_topology(wanted.machines, self._job.selection.ranks)
                    await attempt.offer(Offer(topology=topology, answers=wanted.answers))
            except ShareComputeError as failure:
                # If the attempt is lost, `_write_events` raises an error. Otherwise the loop resends this change.
                _log.warning("job %s did not receive its machines: %s", self._job.id, failure.message)
                await asyncio.sleep(_POLL_S)
            else:
                assigned = wanted


def _failure(events: list[AttemptEvent]) -> AttemptFailure | None:
    ended = events[-1] if events else None
    if not isinstance(ended, AttemptEnded) or ended.outcome != "failed":
        return None
    return AttemptFailure.reported(ended.reason, ended.error)
