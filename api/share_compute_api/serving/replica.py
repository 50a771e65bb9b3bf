"""Replicas of deployments as Ray actors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from pydantic import TypeAdapter

from share_compute.errors import ShareComputeError
from share_compute.serving.events import SequenceEvent, read_events
from share_compute.serving.options import Generation
from share_compute.serving.status import ServingStatus
from share_compute.topology import Topology
from share_compute_api.cluster.cluster import Cluster
from share_compute_api.cluster.gateway import ANSWER_S, RemoteActor, translated

if TYPE_CHECKING:
    from share_compute_actors.serving.assignment import ServingAssignment

_STOP_S = 10.0
"""Time in which a server ends its members, before it is ended with them."""
_generations: TypeAdapter[list[Generation]] = TypeAdapter(list[Generation])
_topology: TypeAdapter[Topology] = TypeAdapter(Topology)


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


def replica_launcher(cluster: Cluster) -> LaunchReplica:
    """Return what starts replicas on the head of this cluster."""

    async def launch(assignment: ServingAssignment) -> Replica:
        with _translated(assignment.spec.name):
            actor = await cluster.start_deployment(assignment.model_dump_json(), [assignment.folder])
        return RayReplica(assignment.spec.name, actor)

    return launch


class RayReplica:
    """A `DeploymentServer` actor.

    Args:
        name: of the deployment.
        actor: reached through the gateway.
    """

    def __init__(self, name: str, actor: RemoteActor) -> None:
        self._name = name
        self._actor = actor

    async def submit(self, generations: Sequence[Generation]) -> None:
        """Take sequences in, all or none."""
        await self._ask("submit", _generations.dump_json(list(generations)).decode())

    async def cancel(self, sequences: Sequence[int]) -> None:
        """End sequences that nobody wants any more."""
        await self._ask("cancel", list(sequences))

    async def pull(self, after: int, timeout_s: float) -> list[SequenceEvent]:
        """Return what was told of all sequences after the first ``after`` events."""
        return read_events(await self._ask("pull", after, timeout_s, more_s=timeout_s))

    async def status(self) -> ServingStatus:
        """Return how it is."""
        return ServingStatus.model_validate_json(await self._ask("status"))

    async def offer(self, topology: Topology) -> None:
        """Say which machines it may use from now on."""
        await self._ask("offer", _topology.dump_json(topology).decode())

    async def _ask(self, method: str, *arguments: Any, more_s: float = 0.0) -> Any:
        """Call a method that waits for ``more_s`` before it answers."""
        with _translated(self._name):
            return await self._actor.call(method, *arguments, timeout_s=ANSWER_S + more_s)

    async def close(self) -> None:
        """End it and all that it started."""
        with suppress(ShareComputeError, TimeoutError), _translated(self._name):
            async with asyncio.timeout(_STOP_S):
                await self._actor.call("stop")
                await self._actor.ended()
        self._actor.kill()


def _translated(name: str) -> AbstractContextManager[None]:
    log = "look into the server's log"
    return translated(f"the server of {name}", mistake_mend=log, loss_mend="it is started again")
