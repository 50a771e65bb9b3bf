"""Replicas of deployments as Ray actors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from share_compute.errors import ShareComputeError
from share_compute.serving.events import SequenceEvent
from share_compute.serving.options import Generation
from share_compute.serving.status import ServingStatus
from share_compute.topology import Topology
from share_compute_api.supervision import ClusterInfo
from share_compute_api.supervision.ray_errors import translated

if TYPE_CHECKING:
    from share_compute_actors.serving.assignment import ServingAssignment

_RETRY_S = 0.5
_STOP_S = 10.0
"""Time in which a server ends its members, before it is ended with them."""

_log = logging.getLogger(__name__)


class Replica(Protocol):
    """What serves one replica of a deployment, somewhere.

    Every method but `close` raises ContributorLost when its process died, and Unavailable when it made a mistake.
    """

    async def submit(self, generations: Sequence[Generation]) -> None:
        """Take sequences in, all or none.

        Raises:
            TooLong: a prompt leaves no room for a token.
            Busy: too many wait already.
            UserError: they cannot be served as they are.
        """

    async def cancel(self, sequences: Sequence[int]) -> None:
        """End sequences that nobody wants any more."""

    async def pull(self, after: int, timeout_s: float) -> list[SequenceEvent]:
        """Return what was told of all sequences after the first ``after`` events; waits if there is nothing more."""

    async def status(self) -> ServingStatus:
        """Return how it is."""

    async def offer(self, topology: Topology) -> None:
        """Say which machines it may use from now on, in place of those that it was told before."""

    async def close(self) -> None:
        """End it and all that it started."""


LaunchReplica: TypeAlias = Callable[["ServingAssignment"], Awaitable[Replica]]


def replica_launcher(cluster: ClusterInfo) -> LaunchReplica:
    """Return what starts replicas on the head of this cluster."""

    async def launch(assignment: ServingAssignment) -> Replica:
        return await asyncio.to_thread(_start, cluster, assignment)

    return launch


def _start(cluster: ClusterInfo, assignment: ServingAssignment) -> RayReplica:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from share_compute_actors.serving.server import DeploymentServer

    with _translated(assignment.spec.name):
        here = NodeAffinitySchedulingStrategy(cluster.head_node_id, soft=False)
        actor = DeploymentServer.options(scheduling_strategy=here).remote(  # type: ignore[attr-defined]
            assignment.model_dump_json()
        )
        return RayReplica(assignment.spec.name, actor)


class RayReplica:
    """A `DeploymentServer` actor; begins it.

    Args:
        name: of the deployment.
        actor: its handle; lives as long as this.
    """

    def __init__(self, name: str, actor: Any) -> None:
        self._name = name
        self._actor = actor
        self._run = actor.run.remote()

    async def submit(self, generations: Sequence[Generation]) -> None:
        """Take sequences in, all or none."""
        await self._ask("submit", list(generations))

    async def cancel(self, sequences: Sequence[int]) -> None:
        """End sequences that nobody wants any more."""
        await self._ask("cancel", list(sequences))

    async def pull(self, after: int, timeout_s: float) -> list[SequenceEvent]:
        """Return what was told of all sequences after the first ``after`` events."""
        events: list[SequenceEvent] = await self._ask("pull", after, timeout_s)
        return events

    async def status(self) -> ServingStatus:
        """Return how it is."""
        return ServingStatus.model_validate_json(await self._ask("status"))

    async def offer(self, topology: Topology) -> None:
        """Say which machines it may use from now on."""
        from share_compute_actors.serving.server import topologies

        await self._ask("offer", topologies.dump_json(topology).decode())

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method; again and again while the process cannot be reached but is not known to be dead."""
        from ray.exceptions import ActorUnavailableError

        with _translated(self._name):
            while True:
                try:
                    return await getattr(self._actor, method).remote(*arguments)
                except ActorUnavailableError as failure:
                    _log.info("%s: %s", self._name, type(failure).__name__)
                await asyncio.sleep(_RETRY_S)

    async def close(self) -> None:
        """End it and all that it started."""
        import ray

        if not ray.is_initialized():
            return
        with suppress(ShareComputeError, TimeoutError), _translated(self._name):
            async with asyncio.timeout(_STOP_S):
                await self._actor.stop.remote()
                await self._run
        ray.kill(self._actor)


def _translated(name: str) -> AbstractContextManager[None]:
    log = "look into the server's log"
    return translated(f"the server of {name}", mistake_mend=log, loss_mend="it is started again")
