"""Decides which machines each running job may use: the machines it holds, and free ones that are offered to it.

An offer leases nothing. A coordinator that wants an offered machine proposes a plan with that machine. Recording the
proposal leases the machine, and the next allotment confirms the lease. If another job leased the machine first, the
machine is missing in the allotment. The coordinator then withdraws the plan, and the plan's other new machines are
released.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from share_compute.lifecycle.states import ContributorState
from share_compute.store import ContributorRecord, JobRecord
from share_compute_api.control.patience import Patience

Nodes: TypeAlias = frozenset[tuple[str, str | None, frozenset[str]]]
"""For each machine: its id, its Ray node, and the ids of the machines to which its links are dead."""


def nodes_of(machines: Iterable[ContributorRecord]) -> Nodes:
    """Return, for each machine, the facts whose change causes a new plan of a job."""
    return frozenset(
        (machine.id, machine.node_id, frozenset(link.target for link in machine.links or () if link.is_dead))
        for machine in machines
    )


@dataclass(frozen=True, slots=True)
class Allotment:
    """Machines that one attempt may use, and machines that the attempt must release."""

    machines: tuple[ContributorRecord, ...] = field(compare=False)
    """The machines that the attempt holds, and the machines that are offered to it."""
    nodes: Nodes
    """Facts about the machines. When these facts change, the machines are sent to the attempt again. Comparisons ignore
    ``machines``, because each heartbeat changes the records."""
    leaving: frozenset[str] = frozenset()
    """Ids of contributors in the attempt's plan or proposal that the attempt must release."""
    answers: int | None = None
    """Step of the attempt's pending proposal; None if no proposal is pending. The proposal is granted if all its
    machines are in this allotment."""


def allotment(
    machines: Iterable[ContributorRecord], leaving: Iterable[str] = (), answers: int | None = None
) -> Allotment:
    """Return the allotment for an attempt that may use ``machines`` and must release ``leaving``."""
    machines = tuple(machines)
    return Allotment(machines, nodes_of(machines), frozenset(leaving), answers)


class Allotted:
    """Holds the newest allotment of one attempt; readers can wait for a change.

    Args:
        assigned: the allotment that the attempt received at its start.
    """

    def __init__(self, assigned: Allotment) -> None:
        self.assigned = assigned
        self._newest = assigned
        self._changed = asyncio.Event()

    def put(self, newest: Allotment) -> None:
        """Replace the allotment, and wake the tasks that wait in `other_than`."""
        self._newest = newest
        self._changed.set()

    async def other_than(self, known: Allotment) -> Allotment:
        """Wait until the newest allotment differs from ``known``, and return the newest."""
        while self._newest == known:
            self._changed.clear()
            await self._changed.wait()
        return self._newest


class Allotting:
    """Offers each free machine to one running job at a time, beginning with the oldest job.

    Args:
        patience: time limits; ``offer_s`` is the time to accept an offer before the next job gets it.
        clock: returns the time in seconds.
    """

    def __init__(self, patience: Patience, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._offers: dict[str, tuple[str, float]] = {}
        """Current offers: contributor id -> (job id, time of the offer in seconds)."""

    def allot(
        self,
        running: Sequence[JobRecord],
        present: Sequence[ContributorRecord],
        spare: Sequence[ContributorRecord],
    ) -> dict[str, Allotment]:
        """Update the offers of spare machines, and return the allotment of each running job by job id.

        Args:
            running: jobs with an attempt, oldest first.
            present: contributors; only ready and draining contributors are considered.
            spare: free machines that no queued job could use.
        """
        members = {job.id: _members(job, present) for job in running}
        # Include machines of pending proposals, even if they are not leased yet, so that no other job is offered them.
        planned = frozenset().union(*members.values())
        takers = [job for job in running if _takes_more(job)]
        self._offer([machine for machine in spare if machine.id not in planned], takers)
        machines = {machine.id: machine for machine in present}
        return {job.id: self._of(job, members[job.id], machines) for job in running}

    def _of(
        self, job: JobRecord, members: Iterable[str], machines: Mapping[str, ContributorRecord]
    ) -> Allotment:
        leaving = {one for one in members if one in machines and _must_leave(machines[one], job)}
        usable = [
            machine
            for machine in machines.values()
            if machine.state is ContributorState.ready
            and job.selection.allows(machine)
            and (machine.job_id == job.id or self._offers.get(machine.id, ("",))[0] == job.id)
        ]
        return allotment(usable, leaving, None if job.proposal is None else job.proposal.step)

    def _offer(self, spare: Iterable[ContributorRecord], jobs: Sequence[JobRecord]) -> None:
        now = self._clock()
        offers = {}
        for machine in spare:
            takers = [job.id for job in jobs if job.may_use(machine)]
            if not takers:
                continue
            job_id, since = self._offers.get(machine.id, ("", now))
            if job_id not in takers:
                job_id, since = takers[0], now
            elif now - since >= self._patience.offer_s:
                job_id, since = takers[(takers.index(job_id) + 1) % len(takers)], now
            offers[machine.id] = job_id, since
        self._offers = offers


def _members(job: JobRecord, present: Iterable[ContributorRecord]) -> frozenset[str]:
    """Return the contributors in a job's plan and proposal; for a job without a plan, the contributors leased to it."""
    if job.plan is None:
        return frozenset(machine.id for machine in present if machine.job_id == job.id)
    return job.plan.machines if job.proposal is None else job.plan.machines | job.proposal.plan.machines


def _takes_more(job: JobRecord) -> bool:
    """Return whether a job can use more machines.

    The job must have a plan and no cancellation request. It can use more machines if its specification leaves the
    number of stages open, or if its plan has fewer machines than it requested.
    """
    if job.plan is None or job.cancel_requested_at is not None:
        return False
    members = sum(len(stage.members) for stage in job.plan.stages)
    return job.gains_from_more or members < job.machines_needed


def _must_leave(machine: ContributorRecord, job: JobRecord) -> bool:
    """Return whether a job must release a machine.

    This is the case if the machine is draining, is leased to another job or to a deployment, or rejoined with labels
    that the job avoids.
    """
    is_others = machine.job_id not in (None, job.id) or machine.deployment_id is not None
    is_avoided = not job.selection.allows(machine)
    return machine.state is ContributorState.draining or is_others or is_avoided
