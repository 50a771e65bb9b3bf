"""Supervises contributors: marks them as left or lost, and schedules new measurements of idle ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta

from share_compute.errors import Conflict, NotFound, ShareComputeError
from share_compute.lifecycle.states import HERE, ContributorState
from share_compute.store import ContributorRecord, JobRecord, Store
from share_compute_actors.machine.reach import Place, answers
from share_compute_api.cluster.calls import NodeFacts
from share_compute_api.control import AWAY
from share_compute_api.control.machines.measuring import Measurements
from share_compute_api.control.polling import POLL_S

_JOINING_LIMIT = timedelta(seconds=180)
_PROBING_LIMIT = timedelta(seconds=30)
"""Time after which a contributor in state "probing" counts as lost if no measurement of it is running."""
_CALLS_APART = timedelta(seconds=4)
"""Maximum age of a heartbeat from another host that still shows that this server is not cut off from the network."""
_HEARTBEAT_LIMIT = timedelta(seconds=30)
"""Time without a heartbeat after which a contributor is lost although its Ray node answers. During a shorter gap the
agent may be busy, or waiting before a retry."""
_SUSPENDED = timedelta(seconds=5)
"""Longest plausible duration of one poll and the pause after it. If they take longer, the server's process was
probably suspended and received no heartbeats."""
DISAGREEMENT = 2.0
"""Factor between a machine's measured and predicted compute time at which the machine is measured again after a job.
The measured compute time is the median over the job's last steps."""
_log = logging.getLogger(__name__)


def disagrees(job: JobRecord, contributor_id: str) -> bool:
    """Return whether a machine's measured and predicted compute times differ by a factor of `DISAGREEMENT` or more.

    The times are per step. Return False if one of them is unknown.
    """
    if job.measured is None or job.plan is None or job.plan.prediction is None:
        return False
    measured_s = job.measured.machines.get(contributor_id, 0.0)
    predicted_s = job.plan.prediction.step_s * sum(
        member.busy_fraction or 0.0
        for stage in job.plan.stages
        for member in stage.members
        if member.contributor_id == contributor_id
    )
    if measured_s <= 0 or predicted_s <= 0:
        return False
    return not 1 / DISAGREEMENT < measured_s / predicted_s < DISAGREEMENT


class ContributorSupervisor:
    """Marks contributors as left or lost, and schedules new measurements of them.

    Args:
        store: the store of contributors.
        measurements: measures contributors.
        nodes: returns Ray's facts about its nodes.
        lost_after: time without a heartbeat after which a contributor is lost if its node does not answer either.
    """

    def __init__(
        self,
        store: Store,
        measurements: Measurements,
        nodes: Callable[[], Awaitable[Sequence[NodeFacts]]],
        lost_after: timedelta,
    ) -> None:
        self._lost_after = lost_after
        self._store = store
        self._measurements = measurements
        self._nodes = nodes
        self._listening_since = store.clock()
        """Time from which missing heartbeats count: the server's start, or when it last seemed suspended or cut off."""
        self._jobs: dict[str, str] = {}
        """Contributor id -> job that held the contributor's lease in the last pass."""
        self._has_marked = False
        """Whether `mark_earlier` was completed."""
        self._unmeasured: dict[tuple[str, str | None], datetime] = {}
        """(Contributor id, node id) -> time since which the contributor is in state "probing", but is not measured."""

    async def run(self) -> None:
        """Watch until cancelled; while the store does not answer, no contributor is marked as lost."""
        await self.mark_earlier()
        while True:
            before = self._store.clock()
            try:
                await self.poll()
            except ShareComputeError as failure:
                _log.warning("contributors could not be checked: %s", failure.message)
            await asyncio.sleep(POLL_S)
            if (now := self._store.clock()) - before > _SUSPENDED:
                _log.warning(
                    "this server was suspended or blocked for %.0f s", (now - before).total_seconds()
                )
                self._listening_since = now

    async def mark_earlier(self) -> None:
        """Mark machines known only from an earlier server process: "left" if they were draining, else "lost".

        Machines in state "joining" keep their state. A lost machine is restored when its agent reconnects. Agents
        reconnect at once when the answer to a heartbeat says that they are lost, so call this method before the first
        request is answered. Later calls do nothing.
        """
        if self._has_marked:
            return
        for record in await asyncio.to_thread(self._store.contributors.list, HERE):
            if record.state is ContributorState.joining or self._measurements.is_known(record.id):
                continue
            if record.state is ContributorState.draining:
                await self._change(record, ContributorState.left, "it left while the server was away")
            else:
                await self._change(record, ContributorState.lost, AWAY)
        self._has_marked = True

    async def poll(self) -> None:
        """Check all contributors once, and record changes of their states."""
        # Read the clock first, so that a suspension during this poll makes no heartbeat look overdue.
        now = self._store.clock()
        # Read the store before Ray's nodes, so that a node that starts between the two reads counts as alive.
        records = await asyncio.to_thread(self._store.contributors.list, HERE)
        nodes = {node.node_id: node for node in await self._nodes() if node.is_alive} if records else {}
        unresponsive = await self._unresponsive(records, nodes, now)
        self._unmeasured = {
            (record.id, record.node_id): self._unmeasured.get((record.id, record.node_id), now)
            for record in records
            if record.state is ContributorState.probing and not self._measurements.is_measuring(record.id)
        }
        self._measurements.measure_dead_links(
            [record for record in records if record.state is ContributorState.ready]
        )
        for record in records:
            change = self._decide(
                record, is_alive=record.node_id in nodes, is_unresponsive=record.id in unresponsive, now=now
            )
            if change is not None:
                await self._change(record, *change)
        await self._doubt_those_done(records)
        self._measurements.measure_idle(records)

    async def _doubt_those_done(self, records: Sequence[ContributorRecord]) -> None:
        """Schedule a new measurement of each released machine for which `disagrees` is true."""
        for record in records:
            job_id = self._jobs.get(record.id)
            if job_id is None or record.job_id == job_id:
                continue
            try:
                job = await asyncio.to_thread(self._store.jobs.get, job_id)
            except NotFound:  # the job was deleted in the meantime
                continue
            if disagrees(job, record.id):
                _log.info("contributor %s is measured again: job %s disagrees", record.name, job_id)
                self._measurements.want(record.id)
        self._jobs = {record.id: record.job_id for record in records if record.job_id is not None}

    async def _unresponsive(
        self, records: Sequence[ContributorRecord], nodes: Mapping[str, NodeFacts], now: datetime
    ) -> frozenset[str]:
        """Return the ids of the contributors that are unresponsive although Ray lists their nodes as alive.

        A contributor is unresponsive if its heartbeat is overdue and its Ray node accepts no connection, or if no
        heartbeat arrived for `_HEARTBEAT_LIMIT`. If this server itself is probably cut off, return no ids, and count
        missing heartbeats only from now on.
        """
        places = {
            record.id: (node.address, node.port)
            for record in records
            if (node := nodes.get(record.node_id or "")) is not None
        }
        waits = {record.id: now - max(record.last_seen_at, self._listening_since) for record in records}
        unresponsive = [one for one in places if waits[one] > self._lost_after]
        if not unresponsive:
            return frozenset()
        found = await asyncio.to_thread(answers, places.values())
        here = {node.address for node in nodes.values() if node.is_head}
        has_heartbeats = any(
            waits[one] < _CALLS_APART for one, (address, _) in places.items() if address not in here
        )
        if not has_heartbeats and _is_cut_off(places.values(), found, here):
            self._listening_since = now
            return frozenset()
        return frozenset(
            one for one in unresponsive if found.get(places[one]) != "open" or waits[one] > _HEARTBEAT_LIMIT
        )

    def _decide(
        self, record: ContributorRecord, *, is_alive: bool, is_unresponsive: bool, now: datetime
    ) -> tuple[ContributorState, str] | None:
        if record.state is ContributorState.joining:
            if now - max(record.last_seen_at, self._listening_since) > _JOINING_LIMIT:
                return (
                    ContributorState.lost,
                    f"its Ray node did not come up within {_JOINING_LIMIT.seconds} s",
                )
            return None
        if record.state is ContributorState.draining:
            is_done = not record.is_leased or not is_alive or is_unresponsive
            return (ContributorState.left, record.reason) if is_done else None
        why_lost = None
        if not is_alive:
            why_lost = "its Ray node is dead or does not answer"
        elif is_unresponsive:
            why_lost = f"nothing was heard from it for {(now - record.last_seen_at).seconds} s"
        elif now - self._unmeasured.get((record.id, record.node_id), now) > _PROBING_LIMIT:
            why_lost = "the server did not measure it"
        return (ContributorState.lost, why_lost) if why_lost else None

    async def _change(self, seen: ContributorRecord, state: ContributorState, reason: str) -> None:
        # Get the function now, because the contributor may reconnect with a new actor before the store has answered.
        forget = self._measurements.forgetting(seen.id)
        try:
            changed = await asyncio.to_thread(self._store.contributors.set_state, seen, state, reason)
        except Conflict as gone:
            _log.info("%s", gone.message)
            return
        if changed is not None:
            forget()
            # No warning after a restart of the server, because every machine then counts as lost for a moment.
            is_news = state is ContributorState.lost and reason != AWAY
            level = logging.WARNING if is_news else logging.INFO
            _log.log(level, "contributor %s is %s: %s", seen.name, state.value, reason)


def _is_cut_off(places: Collection[Place], found: Collection[Place], here: Collection[str]) -> bool:
    """Return whether this server itself is probably cut off, because no node of another host answers.

    If contributors run on this server's host and on only one other host, assume that the other host failed.

    Args:
        places: address and port of each contributor's Ray node.
        found: the places whose host accepted or refused the connection.
        here: addresses of this server's own host.
    """
    hosts = {address for address, _ in places} - set(here)
    if not hosts or hosts & {address for address, _ in found}:
        return False
    return len(hosts) > 1 or all(address in hosts for address, _ in places)
