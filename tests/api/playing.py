"""A cluster without machines: a store, the supervisor of jobs, and attempts whose events a test declares."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from share_compute.errors import ShareComputeError
from share_compute.lifecycle.attempt_events import (
    Assignment,
    AttemptEnded,
    AttemptEvent,
    Offer,
    Planned,
    ReplanProposed,
    StepCommitted,
)
from share_compute.lifecycle.states import ContributorState
from share_compute.planning.plan import MemberPlan, Plan, StagePlan
from share_compute.specification import parse_job
from share_compute.store import JobRecord, Store
from share_compute.topology import Device, Link
from share_compute_api.connection.notifier import Notifier
from share_compute_api.control.jobs.jobs import JobSupervisor
from share_compute_api.control.patience import Patience

AT_ONCE = Patience(retry_s=0)


class Attempt:
    """A coordinator that reports the events that a test puts in."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.reported: list[AttemptEvent] = []
        self.failure: ShareComputeError | None = None
        self.is_unresponsive = False
        self.cancelled = asyncio.Event()
        self.suspended = asyncio.Event()
        self.suspension = asyncio.Event()
        """Set when it may answer the request to suspend."""
        self.suspension.set()
        self.killed = asyncio.Event()
        self.offers: asyncio.Queue[Offer] = asyncio.Queue()
        self.drains: asyncio.Queue[str] = asyncio.Queue()
        self.refusals: list[ShareComputeError] = []
        """Raised by the next offers, one each."""
        self._news = asyncio.Condition()

    async def report(self, *events: AttemptEvent) -> None:
        async with self._news:
            self.reported += events
            self._news.notify_all()

    async def events(self, after: int, timeout_s: float) -> list[AttemptEvent]:
        if self.is_unresponsive:
            await asyncio.Event().wait()
        async with self._news:
            try:
                async with asyncio.timeout(timeout_s / 20):
                    await self._news.wait_for(lambda: len(self.reported) > after or self.failure)
            except TimeoutError:
                return []
            if self.failure is not None:
                raise self.failure
            return self.reported[after:]

    async def die(self, failure: ShareComputeError) -> None:
        async with self._news:
            self.failure = failure
            self._news.notify_all()

    async def cancel(self) -> None:
        self.cancelled.set()
        if self.is_unresponsive:
            await asyncio.Event().wait()

    async def suspend(self) -> None:
        self.suspended.set()
        await self.suspension.wait()
        await self.report(AttemptEnded(outcome="succeeded", reason="done"))

    async def offer(self, offer: Offer) -> None:
        if self.refusals:
            raise self.refusals.pop()
        await self.offers.put(offer)

    async def drain(self, contributor_id: str) -> None:
        await self.drains.put(contributor_id)

    def kill(self) -> None:
        self.killed.set()


class Cluster:
    """A store, a supervisor, and the attempts that it started."""

    def __init__(self, store: Store, folder: Path, patience: Patience) -> None:
        self.store = store
        self.notifier = Notifier()
        self.attempts: asyncio.Queue[Attempt] = asyncio.Queue()
        self.members: dict[str, set[str]] = {}
        """By contributor, the jobs that have members there."""
        self.supervisor = JobSupervisor(
            store, self._launch, folder, self.notifier, patience, members=self._members
        )
        store.on_commit(self.notifier.notify)
        self._nodes = count(1)

    async def _members(self) -> dict[str, set[str]]:
        return dict(self.members)

    async def _launch(self, assignment: Assignment) -> Attempt:
        attempt = Attempt(assignment)
        attempt.is_unresponsive = assignment.spec.name == "unresponsive"
        await self.attempts.put(attempt)
        return attempt

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the supervisor while the block runs; a failure of the supervisor cancels the block and is raised."""
        async with asyncio.timeout(240), asyncio.TaskGroup() as group:
            task = group.create_task(self.supervisor.run())
            yield
            task.cancel()

    def join(self, name: str, **labels: str) -> str:
        limits = {"cpu_threads": 2, "memory_bytes": 2**30, "labels": labels}
        record, _ = self.store.contributors.join(
            self.store.invites.create()[1], name=name, host="h", versions={}, limits=limits
        )
        return record.id

    def arrive(self, contributor_id: str) -> None:
        node_id = f"{next(self._nodes):02x}"
        self.store.contributors.online(contributor_id, node_id=node_id, address="192.0.2.7")
        links = [Link(contributor_id, "head", 0.001, 1e9), Link(contributor_id, "con-gone", 0.001, 1e9)]
        self.store.contributors.ready(contributor_id, capacity=[Device("cpu", "c", 2**30)], links=links)

    def contributor(self, name: str, **labels: str) -> str:
        contributor_id = self.join(name, **labels)
        self.arrive(contributor_id)
        return contributor_id

    def lose(self, contributor_id: str, reason: str) -> None:
        seen = self.store.contributors.get(contributor_id)
        self.store.contributors.set_state(seen, ContributorState.lost, reason)

    def submit(self, name: str = "job", **parallelism: Any) -> str:
        layers = [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]
        source = {"name": name, "model": {"layers": layers}, "data": {"dataset": "digits"}}
        return self.store.jobs.create(parse_job({**source, "parallelism": parallelism})).id

    async def until(self, job_id: str, condition: Callable[[JobRecord], Any]) -> JobRecord:
        while True:
            ticket = self.notifier.ticket
            record = await asyncio.to_thread(self.store.jobs.get, job_id)
            if condition(record):
                return record
            await self.notifier.wait(ticket, 1.0)


def laid(*contributor_ids: str) -> Plan:
    members = tuple(
        MemberPlan(contributor_id=one, name=one, microbatches=(0,), memory_bytes=1, reason="")
        for one in contributor_ids
    )
    stage = StagePlan(start=0, stop=1, parameters=1, members=members)
    return Plan(epoch=0, strategy="uniform", num_layers=1, parameters=1, stages=(stage,), microbatches=1)


def planned(*contributor_ids: str) -> Planned:
    return Planned(plan=laid(*contributor_ids))


def proposed(number: int, *contributor_ids: str) -> ReplanProposed:
    return ReplanProposed(
        step=number,
        plan=laid(*contributor_ids),
        current_step_s=2,
        gain_s=9,
        move_cost_s=1,
        sentence="it pays",
    )


def step(number: int) -> StepCommitted:
    return StepCommitted(
        step=number,
        loss=1.0,
        learning_rate=0.1,
        gradient_norm=None,
        samples=1,
        tokens=1,
        seconds=1,
        tokens_per_s=1,
    )


def falling_step(number: int, seconds: float = 1) -> StepCommitted:
    """Return a step of four samples whose loss is the inverse of its number."""
    sizes = {"loss": 1 / number, "samples": 4, "tokens": 4, "seconds": seconds, "tokens_per_s": 4}
    return step(number).model_copy(update=sizes)


def run(
    store: Store,
    tmp_path: Path,
    story: Callable[[Cluster], Awaitable[None]],
    patience: Patience = AT_ONCE,
) -> None:
    cluster = Cluster(store, tmp_path / "jobs", patience)

    async def main() -> None:
        async with cluster.running():
            await story(cluster)

    asyncio.run(main())
