"""Runs attempts at jobs as Ray actors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeAlias

from share_compute.errors import Unavailable, VerificationFailed
from share_compute.lifecycle.attempt_events import (
    ArtifactSaved,
    Assignment,
    AttemptEvent,
    CheckpointSaved,
    Offer,
    SparseAssignment,
    attempt_events,
)
from share_compute.specification.paths import named_paths
from share_compute_api.cluster.cluster import Cluster
from share_compute_api.cluster.gateway import ANSWER_S, RemoteActor, translated
from share_compute_api.submission.data_roots import DataRoots


class Attempt(Protocol):
    """One attempt at a job."""

    async def events(self, after: int, timeout_s: float) -> list[AttemptEvent]:
        """Skip the first ``after`` events and return the rest; wait up to ``timeout_s`` seconds if there are none.

        ``after`` must never decrease, because the attempt discards the events that a call skips.
        """

    async def cancel(self) -> None:
        """Ask the attempt to stop soon, and to abandon its current step."""

    async def suspend(self) -> None:
        """Ask the attempt to end with a checkpoint after its current step; the job is then requeued."""

    async def offer(self, offer: Offer) -> None:
        """Send the attempt the machines that it may use from now on; this replaces earlier offers.

        The attempt keeps the machines that it holds, and requests others by proposing a plan that uses them. An offered
        machine may be used again, even if it was drained before.
        """

    async def drain(self, contributor_id: str) -> None:
        """Ask the attempt to move a machine's state to other members, and to stop using the machine."""

    def kill(self) -> None:
        """End the attempt at once; the job's members may keep running."""


Launch: TypeAlias = Callable[[Assignment | SparseAssignment], Awaitable[Attempt]]


def launcher(cluster: Cluster) -> Launch:
    """Return a function that starts attempts on the head node of this cluster."""

    async def launch(assignment: Assignment | SparseAssignment) -> Attempt:
        with _translated(assignment.job_id):
            is_sparse = isinstance(assignment, SparseAssignment)
            start = cluster.start_sparse_coordinator if is_sparse else cluster.start_coordinator
            actor = await start(assignment.model_dump_json(), named_paths(assignment.spec), assignment.folder)
        return RayAttempt(assignment.job_id, assignment.folder, actor)

    return launch


def rechecked(launch: Launch, roots: DataRoots) -> Launch:
    """Return a function that validates a job's paths again, and then calls ``launch``."""

    async def start(assignment: Assignment | SparseAssignment) -> Attempt:
        await asyncio.to_thread(roots.recheck, assignment.spec)
        return await launch(assignment)

    return start


class RayAttempt:
    """An attempt at a job that runs in a `Coordinator` actor.

    Args:
        job_id: id of the job.
        folder: the job's own folder; the coordinator may save files nowhere else.
        actor: the coordinator, reached through the gateway.
    """

    def __init__(self, job_id: str, folder: Path, actor: RemoteActor) -> None:
        self._job_id = job_id
        self._folder = folder
        self._actor = actor
        self._end: asyncio.Future[None] | None = None

    async def events(self, after: int, timeout_s: float) -> list[AttemptEvent]:
        """Skip the first ``after`` events and return the rest; wait up to ``timeout_s`` seconds if there are none.

        ``after`` must never decrease, because the coordinator discards the events that a call skips. The wait may be
        longer while the connection to Ray is down.

        Raises:
            ContributorLost: the coordinator died.
            Unavailable: the coordinator failed, or ended without reporting its end.
            VerificationFailed: an event names a path outside the job's folder.
        """
        if self._end is None:
            self._end = asyncio.ensure_future(self._actor.ended())
            self._end.add_done_callback(_retrieve)
        with _translated(self._job_id):
            events = await self._ask(after, timeout_s)
            if events or not self._end.done():
                return events
            # The coordinator may have reported its last events after the call above and before its end.
            events = await self._ask(after, 0.0)
            if not events:
                self._end.result()
                raise Unavailable(
                    "the attempt ended without a result",
                    hint="look into the server's log",
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
                hint="the coordinator may be compromised: check who has the cluster's token, then "
                "`share-compute rotate-token`",
                job=self._job_id,
            )

    async def cancel(self) -> None:
        """Ask the attempt to stop soon, and to abandon its current step."""
        with _translated(self._job_id):
            await self._actor.call("cancel")

    async def suspend(self) -> None:
        """Ask the attempt to end with a checkpoint after its current step."""
        with _translated(self._job_id):
            await self._actor.call("suspend")

    async def offer(self, offer: Offer) -> None:
        """Send the attempt the machines that it may use from now on; this replaces earlier offers."""
        with _translated(self._job_id):
            await self._actor.call("offer", offer.model_dump_json())

    async def drain(self, contributor_id: str) -> None:
        """Ask the attempt to release a machine."""
        with _translated(self._job_id):
            await self._actor.call("drain", contributor_id)

    def kill(self) -> None:
        """End the coordinator.

        The job's members keep running: a later attempt takes them over, or `Leftovers` ends them.
        """
        self._actor.kill()


def _retrieve(end: asyncio.Future[None]) -> None:
    """Mark the actor's error as retrieved, so that asyncio does not log the error; `events` raises it."""
    if not end.cancelled():
        end.exception()


def _translated(job_id: str) -> AbstractContextManager[None]:
    resume = f"share-compute resume {job_id}"
    hint = "look into the server's log, then resume the job"
    return translated("the job's coordinator", mistake_hint=hint, loss_hint=resume, job=job_id)
