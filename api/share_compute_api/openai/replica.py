"""Starts replicas of deployments as Ray actors, and calls them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from pydantic import TypeAdapter

from share_compute.errors import ShareComputeError
from share_compute.inference.scheduler.events import SequenceEvent, read_events
from share_compute.inference.scheduler.options import Generation
from share_compute.lifecycle.computation import Computation
from share_compute.lifecycle.deployment_status import ServingStatus
from share_compute.topology import Topology
from share_compute_api.cluster.cluster import Cluster
from share_compute_api.cluster.gateway import ANSWER_S, RemoteActor, translated

if TYPE_CHECKING:
    from share_compute_actors.inference.assignment import ServingAssignment

_STOP_S = 10.0
"""Seconds that a replica's server has to end its members before the server is killed."""
_generations: TypeAdapter[list[Generation]] = TypeAdapter(list[Generation])
_topology: TypeAdapter[Topology] = TypeAdapter(Topology)


class Replica(Protocol):
    """One replica of a deployment.

    Every asynchronous method except `close` raises ContributorLost if the replica's process died, and Unavailable if
    the process failed or does not answer.
    """

    async def submit(self, generations: Sequence[Generation]) -> None:
        """Submit sequences to the replica, which accepts either all or none of them.

        Raises:
            TooLong: a prompt leaves no space for a generated token, or a text to embed is too long.
            Conflict: the replica has one of these sequences already.
            Busy: too many sequences are queued.
            UserError: the sequences cannot be served as they are.
        """

    async def cancel(self, sequences: Sequence[int]) -> None:
        """Cancel sequences that no client waits for."""

    async def pull(self, after: int, timeout_s: float) -> list[SequenceEvent]:
        """Skip the first ``after`` events and return the rest; wait up to ``timeout_s`` seconds if there are none.

        ``after`` must never decrease, because the replica discards the events that a call skips.
        """

    async def status(self) -> ServingStatus:
        """Return the status of the replica."""

    async def offer(self, topology: Topology) -> None:
        """Send the replica the machines that it may use from now on; this replaces earlier offers."""

    async def choose_computation(self, computation: Computation) -> None:
        """Send the replica the deployment's stored choice between compiled and eager code."""

    async def set_standby(self, *, is_on: bool) -> None:
        """Put the replica on standby, where it keeps its processes but not its weights, or let it serve again."""

    async def close(self) -> None:
        """End the replica and all processes that it started."""

    def abandon(self) -> None:
        """End only the replica's server, so that a new server can take over the members."""


LaunchReplica: TypeAlias = Callable[["ServingAssignment"], Awaitable[Replica]]


def replica_launcher(cluster: Cluster) -> LaunchReplica:
    """Return a function that starts replicas on the head of this cluster."""

    async def launch(assignment: ServingAssignment) -> Replica:
        with _translated(assignment.spec.name):
            actor = await cluster.start_deployment(assignment.model_dump_json(), [assignment.folder])
        end_members = partial(cluster.end_members, assignment.replica_id)
        return RayReplica(assignment.spec.name, actor, end_members)

    return launch


class RayReplica:
    """One replica of a deployment, which runs in a `DeploymentServer` actor.

    Args:
        name: name of the deployment.
        actor: the server, reached through the gateway.
        end_members: ends all members of the replica.
    """

    def __init__(self, name: str, actor: RemoteActor, end_members: Callable[[], Awaitable[object]]) -> None:
        self._name = name
        self._actor = actor
        self._end_members = end_members

    async def submit(self, generations: Sequence[Generation]) -> None:
        """Submit sequences to the replica, which accepts either all or none of them."""
        await self._ask("submit", _generations.dump_json(list(generations)).decode())

    async def cancel(self, sequences: Sequence[int]) -> None:
        """Cancel sequences that no client waits for."""
        await self._ask("cancel", list(sequences))

    async def pull(self, after: int, timeout_s: float) -> list[SequenceEvent]:
        """Skip the first ``after`` events and return the rest; wait up to ``timeout_s`` seconds if there are none.

        ``after`` must never decrease, because the replica discards the events that a call skips.
        """
        return read_events(await self._ask("pull", after, timeout_s, more_s=timeout_s))

    async def status(self) -> ServingStatus:
        """Return the status of the replica."""
        return ServingStatus.model_validate_json(await self._ask("status"))

    async def offer(self, topology: Topology) -> None:
        """Send the replica the machines that it may use from now on; this replaces earlier offers."""
        await self._ask("offer", _topology.dump_json(topology).decode())

    async def choose_computation(self, computation: Computation) -> None:
        """Send the replica the deployment's stored choice between compiled and eager code."""
        await self._ask("choose_computation", computation.model_dump_json())

    async def set_standby(self, *, is_on: bool) -> None:
        """Put the replica on standby, where it keeps its processes but not its weights, or let it serve again."""
        await self._ask("set_standby", is_on)

    async def _ask(self, method: str, *arguments: Any, more_s: float = 0.0) -> Any:
        """Call a method of the server, with ``more_s`` seconds added to the time limit."""
        with _translated(self._name):
            return await self._actor.call(method, *arguments, timeout_s=ANSWER_S + more_s)

    async def close(self) -> None:
        """End the replica and all processes that it started."""
        with suppress(ShareComputeError, TimeoutError), _translated(self._name):
            async with asyncio.timeout(_STOP_S):
                await self._actor.call("stop")
                await self._actor.ended()
        self._actor.kill()
        with suppress(ShareComputeError):  # after such an error, `Leftovers` ends the members
            await self._end_members()

    def abandon(self) -> None:
        """End only the replica's server, so that a new server can take over the members."""
        self._actor.kill()


def _translated(name: str) -> AbstractContextManager[None]:
    log = "look into the server's log"
    return translated(f"the server of {name}", mistake_hint=log, loss_hint="it is started again")
