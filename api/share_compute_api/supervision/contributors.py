"""Watches contributors: notices those that are gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from datetime import datetime, timedelta

from share_compute.errors import Conflict, ShareComputeError
from share_compute.jobs.states import ContributorState
from share_compute.store import ContributorRecord, Store
from share_compute_api.supervision import AWAY
from share_compute_api.supervision.measuring import Measurements

_LOOK_S = 1.0
_JOINING_LIMIT = timedelta(seconds=180)
_PROBING_LIMIT = timedelta(seconds=30)
"""For a contributor that waits to be measured though nothing measures it."""
_LIVE = (
    ContributorState.joining,
    ContributorState.probing,
    ContributorState.ready,
    ContributorState.quarantined,
    ContributorState.draining,
)
_log = logging.getLogger(__name__)


class ContributorSupervisor:
    """Marks contributors left or lost when they are.

    Args:
        store: where contributors are.
        measurements: what measures them.
        alive_nodes: tells which nodes answer.
    """

    def __init__(
        self,
        store: Store,
        measurements: Measurements,
        alive_nodes: Callable[[], Awaitable[Collection[str]]],
    ) -> None:
        self._store = store
        self._measurements = measurements
        self._alive_nodes = alive_nodes
        self._unmeasured: dict[tuple[str, str | None], datetime] = {}
        """By contributor and node: since when it waits to be measured though nothing measures it."""

    async def run(self) -> None:
        """Watch until cancelled; while the store does not answer, nobody is given up."""
        await self._mark_ghosts()
        while True:
            try:
                await self.look()
            except ShareComputeError as failure:
                _log.warning("contributors could not be looked at: %s", failure.message)
            await asyncio.sleep(_LOOK_S)

    async def _mark_ghosts(self) -> None:
        """What an earlier server knew is lost until its agent comes back, which it does by itself."""
        for record in await asyncio.to_thread(self._store.contributors.list, _LIVE):
            if record.state is ContributorState.joining or self._measurements.is_known(record.id):
                continue
            if record.state is ContributorState.draining:
                await self._change(record, ContributorState.left, "it left while the server was away")
            else:
                await self._change(record, ContributorState.lost, AWAY)

    async def look(self) -> None:
        """Look once at all contributors."""
        # Rows first: a node that comes up between the two questions is then seen as alive.
        records = await asyncio.to_thread(self._store.contributors.list, _LIVE)
        alive = await self._alive_nodes() if records else ()
        now = self._store.clock()
        self._unmeasured = {
            (record.id, record.node_id): self._unmeasured.get((record.id, record.node_id), now)
            for record in records
            if record.state is ContributorState.probing and not self._measurements.is_measuring(record.id)
        }
        for record in records:
            change = self._decide(record, is_alive=record.node_id in alive, now=now)
            if change is not None:
                await self._change(record, *change)

    def _decide(
        self, record: ContributorRecord, *, is_alive: bool, now: datetime
    ) -> tuple[ContributorState, str] | None:
        if record.state is ContributorState.joining:
            if now - record.last_seen_at > _JOINING_LIMIT:
                return (
                    ContributorState.lost,
                    f"its Ray node did not come up within {_JOINING_LIMIT.seconds} s",
                )
            return None
        if record.state is ContributorState.draining:
            is_done = not record.is_leased or not is_alive
            return (ContributorState.left, record.reason) if is_done else None
        if not is_alive:
            return ContributorState.lost, "its Ray node is dead or does not answer"
        if now - self._unmeasured.get((record.id, record.node_id), now) > _PROBING_LIMIT:
            return ContributorState.lost, "the server did not measure it"
        return None

    async def _change(self, seen: ContributorRecord, state: ContributorState, reason: str) -> None:
        forget = self._measurements.forgetting(seen.id)  # it may be back before the store has answered
        try:
            changed = await asyncio.to_thread(self._store.contributors.set_state, seen, state, reason)
        except Conflict as gone:
            _log.info("%s", gone.message)
            return
        if changed is not None:
            forget()
            # After a restart of the server every machine is away for a moment.
            is_news = state is ContributorState.lost and reason != AWAY
            level = logging.WARNING if is_news else logging.INFO
            _log.log(level, "contributor %s is %s: %s", seen.name, state.value, reason)
