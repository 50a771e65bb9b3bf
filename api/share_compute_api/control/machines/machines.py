"""Calls the Ray actors that measure contributors, and translates Ray's errors to the project's own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, TypeVar

from pydantic import TypeAdapter

from share_compute.errors import ContributorLost, Unavailable
from share_compute.topology import Device, Link
from share_compute_api.cluster.cluster import Cluster
from share_compute_api.cluster.gateway import CallFailed, RemoteActor, raised

MEASURE_S = 150.0
"""Time limit for one measurement, in seconds."""
DIAL_S = 8.0
"""Maximum time for which a machine tries to connect to the ports of another machine, in seconds."""
_MOST_CHARACTERS = 1 << 20
"""Largest accepted result of a measurement, in characters."""
_devices: TypeAdapter[tuple[Device, ...]] = TypeAdapter(tuple[Device, ...])
_links: TypeAdapter[tuple[Link, ...]] = TypeAdapter(tuple[Link, ...])
_ports: TypeAdapter[tuple[int, ...]] = TypeAdapter(tuple[int, ...])
_Read = TypeVar("_Read")


class Machine(Protocol):
    """A contributor, or the head, that can measure itself."""

    async def is_alive(self) -> bool:
        """Return whether the machine answers."""

    async def probe(self, limits: Mapping[str, Any], beside: int) -> tuple[Device, ...]:
        """Measure the lent devices while ``beside`` busy threads simulate the load of the host's other machines."""

    async def measure_links(self, peers: Sequence[tuple[str, Machine]]) -> tuple[Link, ...]:
        """Measure the links to these peers; leave out peers that are gone."""

    async def dial(self, address: str, ports: Sequence[int], handshake: str) -> frozenset[int]:
        """Return the ports at ``address`` that do not send ``handshake`` (hexadecimal) when this machine connects."""

    def kill(self) -> None:
        """End the measuring actor; the machine stays in the cluster."""


Start: TypeAlias = Callable[[str, str | None], Awaitable[Machine]]
"""Function that starts a measuring actor, given a contributor's id and Ray node; None means the head's node."""


def starter(cluster: Cluster) -> Start:
    """Return a function that starts a measuring actor on a given node of this cluster."""

    async def start(contributor_id: str, node_id: str | None) -> Machine:
        with _translated(contributor_id):
            return RayMachine(contributor_id, await cluster.start_contributor(contributor_id, node_id))

    return start


class RayMachine:
    """Calls a machine's `ContributorActor`. Validates the results, because the machine's owner may have changed them.

    `probe`, `measure_links` and `dial` raise ContributorLost if the node is gone or does not answer. The project's own
    errors in the actor are raised unchanged. Any other failure in the actor, or an invalid result, raises Unavailable.
    """

    def __init__(self, contributor_id: str, actor: RemoteActor) -> None:
        self._id = contributor_id
        self._actor = actor

    async def is_alive(self) -> bool:
        """Return whether the actor's process answers."""
        return await self._actor.is_alive()

    async def probe(self, limits: Mapping[str, Any], beside: int) -> tuple[Device, ...]:
        """Measure the lent devices while ``beside`` busy threads simulate the load of the host's other machines."""
        count = int(limits.get("devices") or 1)
        wanted = [limits["memory_bytes"], limits["cpu_threads"], limits["device"], beside, count]
        with _translated(self._id):
            found: tuple[Device, ...] = self._read(
                _devices, await self._actor.call("probe", *wanted, timeout_s=MEASURE_S)
            )
        if len(found) != count:
            raise Unavailable(
                f"it lends {count} devices, and measured {len(found)}",
                hint="run share-compute doctor there, and let it join again",
                machine=self._id,
            )
        return found

    async def measure_links(self, peers: Sequence[tuple[str, Machine]]) -> tuple[Link, ...]:
        """Measure the links to these peers; leave out peers that are gone."""
        actors = [(peer_id, peer._actor) for peer_id, peer in peers if isinstance(peer, RayMachine)]  # noqa: SLF001 - the same class
        with _translated(self._id):
            links = self._read(_links, await self._actor.measure_links(actors, timeout_s=MEASURE_S))
        targets = {peer_id for peer_id, _ in actors}
        return tuple(link for link in links if link.source == self._id and link.target in targets)

    async def dial(self, address: str, ports: Sequence[int], handshake: str) -> frozenset[int]:
        """Return the ports at ``address`` that do not send ``handshake`` (hexadecimal) when this machine connects."""
        with _translated(self._id):
            answer = await self._actor.call("dial", address, list(ports), handshake, timeout_s=DIAL_S)
        found: tuple[int, ...] = self._read(_ports, answer)
        return frozenset(found) & frozenset(ports)

    def kill(self) -> None:
        """End the actor."""
        self._actor.kill()

    def _read(self, adapter: TypeAdapter[_Read], answer: object) -> _Read:
        """Parse and validate the contributor's result.

        Raises:
            Unavailable: the result does not match the schema.
        """
        text = answer if isinstance(answer, str) and len(answer) <= _MOST_CHARACTERS else ""
        try:
            return adapter.validate_json(text)
        except ValueError as failure:
            raise Unavailable(
                "it answered a measurement with an invalid message",
                hint="run share-compute doctor there, and let it join again",
                machine=self._id,
            ) from failure


@contextmanager
def _translated(contributor_id: str) -> Iterator[None]:
    try:
        yield
    except CallFailed as failed:
        failure = failed.failure
        if failure.kind == "raised":
            raise raised(failure) from failed
        if failure.kind == "mistake":
            raise Unavailable(
                f"it could not be measured: {failure.message}",
                hint="run share-compute doctor there",
                machine=contributor_id,
            ) from failed
        raise ContributorLost(
            f"it was lost while it was measured: {failure.message}",
            hint="let it join again",
            machine=contributor_id,
        ) from failed
