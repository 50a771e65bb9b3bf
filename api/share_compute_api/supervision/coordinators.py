"""Attempts at jobs as Ray actors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeAlias

from share_compute.errors import Unavailable, VerificationFailed
from share_compute.jobs.events import (
    ArtifactSaved,
    Assignment,
    AttemptEvent,
    CheckpointSaved,
    Offer,
    attempt_events,
)
from share_compute.specification.paths import named_paths
from share_compute_api.cluster.cluster import Cluster
from share_compute_api.cluster.gateway import ANSWER_S, RemoteActor, translated


class Attempt(Protocol):
    """One try at a job, somewhere."""

    async def events(self, after: int, timeout_s: float) -> list[AttemptEvent]:
        """Return events from the ``after``-th on; waits up to ``timeout_s`` for the first."""

    async def cancel(self) -> None:
        """Ask it to stop after the step it is in."""

    async def suspend(self) -> None:
        """Ask it to write a checkpoint after the step it is in, and to end; the job is queued again by that."""

    async def offer(self, offer: Offer) -> None:
        """Say which machines it may use from now on, in place of those it was told before.

        It keeps what it holds, and asks for others by proposing a plan that makes use of them. Who is named may be used
        again, also after a drain.
        """

    async def drain(self, contributor_id: str) -> None:
        """Ask it to do without a machine: to hand over what that one holds, and use it no more."""

    def kill(self) -> None:
        """End it and all that it started."""


Launch: TypeAlias = Callable[[Assignment], Awaitable[Attempt]]


def launcher(cluster: Cluster) -> Launch:
    """Return what starts attempts on the head of this cluster."""

    async def launch(assignment: Assignment) -> Attempt:
        with _translated(assignment.job_id):
            actor = await cluster.start_coordinator(
                assignment.model_dump_json(), named_paths(assignment.spec), assignment.folder
            )
        return RayAttempt(assignment.job_id, assignment.folder, actor)

    return launch


class RayAttempt:
    """An attempt that a `Coordinator` actor makes.

    Args:
        job_id: the job.
        folder: the job's own; the coordinator may save files nowhere else.
        actor: reached through the gateway.
    """

    def __init__(self, job_id: str, folder: Path, actor: RemoteActor) -> None:
        self._job_id = job_id
        self._folder = folder
        self._actor = actor
        self._end: asyncio.Future[None] | None = None

    async def events(self, after: int, timeout_s: float) -> list[AttemptEvent]:
        """Return events from the ``after``-th on; waits up to ``timeout_s`` for the first, longer while Ray is cut off.

        Raises:
            ContributorLost: the coordinator died.
            Unavailable: it failed, or ended without saying how.
        """
        if self._end is None:
            self._end = asyncio.ensure_future(self._actor.ended())
            self._end.add_done_callback(_retrieve)
        with _translated(self._job_id):
            events = await self._ask(after, timeout_s)
            if events or not self._end.done():
                return events
            # It may have told its last events between the question and its end.
            events = await self._ask(after, 0.0)
            if not events:
                self._end.result()
                raise Unavailable(
                    "the attempt ended without saying how",
                    mend="look into the server's log",
                    job=self._job_id,
                )
            return events

    async def _ask(self, after: int, timeout_s: float) -> list[AttemptEvent]:
        answer = await self._actor.call("events", after, timeout_s, timeout_s=timeout_s + ANSWER_S)
        events = attempt_events.validate_json(answer)
        for event in events:
            if isinstance(event, CheckpointSaved | ArtifactSaved):
                self._check_path(event.path)
        return events

    def _check_path(self, path: Path) -> None:
        if ".." in path.parts or self._folder not in path.parents:
            raise VerificationFailed(
                f"the coordinator names {path}, which is not below the job's own folder",
                mend="somebody may have changed it: look who holds the cluster's token, and "
                "`share-compute rotate-token`",
                job=self._job_id,
            )

    async def cancel(self) -> None:
        """Ask it to stop after the step it is in."""
        with _translated(self._job_id):
            await self._actor.call("cancel")

    async def suspend(self) -> None:
        """Ask it to write a checkpoint after the step it is in, and to end."""
        with _translated(self._job_id):
            await self._actor.call("suspend")

    async def offer(self, offer: Offer) -> None:
        """Say which machines it may use from now on, in place of those it was told before."""
        with _translated(self._job_id):
            await self._actor.call("offer", offer.model_dump_json())

    async def drain(self, contributor_id: str) -> None:
        """Ask it to do without a machine."""
        with _translated(self._job_id):
            await self._actor.call("drain", contributor_id)

    def kill(self) -> None:
        """End it and all that it started."""
        self._actor.kill()


def _retrieve(end: asyncio.Future[None]) -> None:
    """Take notice of how it ended: events tell that too, and asyncio complains of what nobody looked at."""
    if not end.cancelled():
        end.exception()


def _translated(job_id: str) -> AbstractContextManager[None]:
    resume = f"share-compute resume {job_id}"
    mend = "look into the server's log, then resume the job"
    return translated("the job's coordinator", mistake_mend=mend, loss_mend=resume, job=job_id)
