"""Replaces the cluster's token after a machine was removed, or when the operator requests a new token.

Ray reads the token only when a process starts, so every node restarts. Before that, each job writes a checkpoint, from
which it continues. Streams of served models continue when their replicas are running again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from share_compute.errors import Conflict
from share_compute.lifecycle.states import HERE, ContributorState
from share_compute.store import Store
from share_compute_api.cluster.cluster import Cluster
from share_compute_api.control.jobs.jobs import JobSupervisor

_LEAVE_S = 90.0
"""Time limit for removed machines to move their state to other machines, in seconds."""
_SUSPEND_S = 120.0
"""Time limit for jobs to write their checkpoints, in seconds."""
_POLL_S = 0.5
_REASON = "the cluster's token was changed; its node restarts with the new one"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rotated:
    """Outcome of a change of the token."""

    jobs: int
    """Number of jobs that were suspended; each continues from its last checkpoint."""
    seconds: float
    """Seconds from the suspension of the jobs until the head ran with the new token."""


class TokenRotation:
    """Replaces the token. Requests that arrive during a replacement share its task.

    Args:
        cluster: the cluster whose token is replaced.
        jobs: supervisor of the jobs; suspends them during a replacement.
        store: the store with the states of the machines.
        spawn: starts a task that ends with the server.
    """

    def __init__(
        self,
        cluster: Cluster,
        jobs: JobSupervisor,
        store: Store,
        spawn: Callable[[Coroutine[Any, Any, Rotated]], asyncio.Task[Rotated]],
    ) -> None:
        self._cluster = cluster
        self._jobs = jobs
        self._store = store
        self._spawn = spawn
        self._under_way: asyncio.Task[Rotated] | None = None
        self._wanted = 0
        """Number of calls to `begin`."""

    def begin(self) -> asyncio.Task[Rotated]:
        """Request a replacement of the token, and return the task that carries it out.

        The task first waits for removed machines to leave, for at most `_LEAVE_S`.
        """
        self._wanted += 1
        if self._under_way is None or self._under_way.done():
            self._under_way = self._spawn(self._rotate())
        return self._under_way

    async def _rotate(self) -> Rotated:
        deadline = time.monotonic() + _LEAVE_S
        while time.monotonic() < deadline and await asyncio.to_thread(self._are_leaving):  # noqa: ASYNC110 - polls rows
            await asyncio.sleep(_POLL_S)
        began_s = time.monotonic()
        async with self._jobs.suspended(_SUSPEND_S) as jobs:
            done = -1
            # A machine that was removed while the head restarted may know the new token, so the token is replaced
            # again.
            while done != self._wanted:
                done = self._wanted
                await self._cluster.rotate_token()
            await asyncio.to_thread(self._call_back)
        _log.warning("the cluster's token was changed; nodes restart with the new one, and jobs continue")
        return Rotated(jobs, time.monotonic() - began_s)

    def _are_leaving(self) -> bool:
        leaving = self._store.contributors.list([ContributorState.draining])
        return any(one.removed_at is not None for one in leaving)

    def _call_back(self) -> None:
        """Mark all machines as lost, so that their agents reconnect at the next heartbeat and jobs wait for them.

        A draining machine is marked as left instead: it has no state left to move, so its node need not restart.
        """
        for record in self._store.contributors.list(HERE):
            is_leaving = record.state is ContributorState.draining
            with suppress(Conflict):  # the record changed in the meantime
                self._store.contributors.set_state(
                    record,
                    ContributorState.left if is_leaving else ContributorState.lost,
                    record.reason if is_leaving else _REASON,
                )
