"""Ends the members of finished jobs and ended replicas, since members outlive their coordinator or replica server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping

from share_compute.errors import ShareComputeError
from share_compute.lifecycle.branch_ids import owner_of
from share_compute.store import Store

_POLL_S = 5.0
_log = logging.getLogger(__name__)


class Leftovers:
    """Ends the members of jobs that are neither running nor queued, and of replicas that do not run.

    Args:
        store: the store of jobs.
        members: returns, for each contributor, the jobs, branches and replicas that have members there.
        end: ends the members of one job, branch or replica, and returns how many it ended.
        serves: returns whether the replica with a given id may have members.
    """

    def __init__(
        self,
        store: Store,
        members: Callable[[], Awaitable[Mapping[str, Collection[str]]]],
        end: Callable[[str], Awaitable[int]],
        serves: Callable[[str], bool],
    ) -> None:
        self._store = store
        self._members = members
        self._end = end
        self._serves = serves

    async def run(self) -> None:
        """Call `poll` every `_POLL_S` s until cancelled; while the store or Ray does not answer, no member is ended."""
        while True:
            try:
                await self.poll()
            except ShareComputeError as failure:
                _log.warning("leftover members of jobs could not be checked: %s", failure.message)
            await asyncio.sleep(_POLL_S)

    async def poll(self) -> None:
        """List the members once, and end the members of finished jobs and of ended replicas."""
        # Read members before jobs. Otherwise a job that starts in between would have members but look inactive.
        present = {job for jobs in (await self._members()).values() for job in jobs}
        if not present:
            return
        living = await asyncio.to_thread(self._living)
        for job_id in sorted(present):
            if owner_of(job_id) in living or self._serves(job_id):
                continue
            ended = await self._end(job_id)
            _log.info("ended %d members of %s, which is over", ended, job_id)

    def _living(self) -> set[str]:
        return {job.id for job in (*self._store.jobs.queued(), *self._store.jobs.active())}
