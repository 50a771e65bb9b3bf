"""Ends the members of jobs that are over: they outlive their coordinators, so somebody must see to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from share_compute.errors import ShareComputeError
from share_compute.store import Store
from share_compute_api.supervision.members import end_members, jobs_with_members

_LOOK_S = 5.0
_log = logging.getLogger(__name__)


class Leftovers:
    """Ends what is left of jobs that neither run nor wait, however they came to be over.

    Args:
        store: where jobs are.
        present: tells which jobs have members.
        end: ends those of one.
    """

    def __init__(
        self,
        store: Store,
        present: Callable[[], Collection[str]] = jobs_with_members,
        end: Callable[[str], int] = end_members,
    ) -> None:
        self._store = store
        self._present = present
        self._end = end

    async def run(self) -> None:
        """Look until cancelled; while the store or Ray does not answer, nobody is ended."""
        while True:
            try:
                await asyncio.to_thread(self.look)
            except ShareComputeError as failure:
                _log.warning("what is left of jobs could not be looked at: %s", failure.message)
            await asyncio.sleep(_LOOK_S)

    def look(self) -> None:
        """Look once."""
        # In this order: who has members and is not among the living jobs then has been over all the time.
        present = self._present()
        if not present:
            return
        living = {job.id for job in (*self._store.jobs.queued(), *self._store.jobs.active())}
        for job_id in sorted(set(present) - living):
            ended = self._end(job_id)
            _log.info("ended %d members of job %s, which is over", ended, job_id)
