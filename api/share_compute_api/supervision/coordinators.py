"""Attempts at jobs as Ray actors, and the one boundary where Ray's errors become ours."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

from share_compute.errors import ContributorLost, ShareComputeError, Unavailable
from share_compute.jobs.events import Assignment, AttemptEvent, attempt_events
from share_compute_api.supervision import ClusterInfo


class Attempt(Protocol):
    """One try at a job, somewhere."""

    async def events(self, after: int, timeout_s: float) -> list[AttemptEvent]:
        """Return events from the ``after``-th on; waits up to ``timeout_s`` for the first."""

    async def cancel(self) -> None:
        """Ask it to stop after the step it is in."""

    def kill(self) -> None:
        """End it and all that it started."""


Launch: TypeAlias = Callable[[Assignment], Awaitable[Attempt]]


def launcher(cluster: ClusterInfo) -> Launch:
    """Return what starts attempts on the head of this cluster."""

    async def launch(assignment: Assignment) -> Attempt:
        return await asyncio.to_thread(_RayAttempt, cluster, assignment)

    return launch


class _RayAttempt:
    """A `Coordinator` actor on the head's node."""

    def __init__(self, cluster: ClusterInfo, assignment: Assignment) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from share_compute_actors.coordinator import Coordinator

        with _translated(assignment.job_id):
            here = NodeAffinitySchedulingStrategy(cluster.head_node_id, soft=False)
            self._job_id = assignment.job_id
            self._actor: Any = Coordinator.options(num_cpus=0, scheduling_strategy=here).remote(  # type: ignore[attr-defined]
                assignment.model_dump_json()
            )
            self._run = self._actor.run.remote()

    async def events(self, after: int, timeout_s: float) -> list[AttemptEvent]:
        with _translated(self._job_id):
            text = await self._actor.events.remote(after, timeout_s)
            events = attempt_events.validate_json(text)
            if not events:
                self._raise_if_over()
            return events

    async def cancel(self) -> None:
        with _translated(self._job_id):
            await self._actor.cancel.remote()

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)

    def _raise_if_over(self) -> None:
        import ray

        over, _ = ray.wait([self._run], timeout=0)
        if over:
            ray.get(self._run)
            raise Unavailable(
                "the attempt ended without saying how", mend="look into the server's log", job=self._job_id
            )


@contextmanager
def _translated(job_id: str) -> Iterator[None]:
    from ray.exceptions import RayActorError, RayError, RayTaskError

    try:
        yield
    except RayTaskError as failure:
        if isinstance(failure.cause, ShareComputeError):
            raise failure.cause from failure
        raise Unavailable(
            f"the coordinator failed: {_first_line(failure.cause)}",
            mend="look into the server's log, then resume the job",
            job=job_id,
        ) from failure
    except RayActorError as failure:
        raise ContributorLost(
            f"the job's coordinator died: {_first_line(failure)}",
            mend=f"share-compute resume {job_id}",
            job=job_id,
        ) from failure
    except RayError as failure:
        raise Unavailable(
            f"Ray does not answer: {_first_line(failure)}", mend=f"share-compute resume {job_id}", job=job_id
        ) from failure


def _first_line(failure: BaseException) -> str:
    """Return the part of Ray's error that is for people; the rest is traces and advice to developers."""
    return next((line.strip() for line in str(failure).splitlines() if line.strip()), type(failure).__name__)
