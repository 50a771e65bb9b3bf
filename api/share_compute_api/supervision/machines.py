"""Contributors as Ray actors that measure themselves, and the one boundary where Ray's errors become ours."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

from share_compute.errors import ContributorLost, ShareComputeError, Unavailable
from share_compute.topology import Device, Link
from share_compute_api.supervision.ray_errors import first_line


class Machine(Protocol):
    """A contributor, or the head, that can be asked to measure."""

    async def is_alive(self) -> bool:
        """Return whether it answers."""

    async def probe(self, limits: Mapping[str, Any]) -> tuple[Device, ...]:
        """Measure the devices that are lent."""

    async def measure_links(self, peers: Sequence[tuple[str, Machine]]) -> tuple[Link, ...]:
        """Measure the links to these; leaves out those that are gone."""

    def kill(self) -> None:
        """End it; what is lent stays."""


Start: TypeAlias = Callable[[str, str], Awaitable[Machine]]
"""Starts a machine from a contributor's id (or ``head``) and its Ray node."""


async def start_machine(contributor_id: str, node_id: str) -> Machine:
    """Start an actor on exactly this node."""
    return await asyncio.to_thread(RayMachine, contributor_id, node_id)


class RayMachine:
    """A `Contributor` actor; lives as long as this.

    Every method raises ContributorLost when its node is gone, what the actor raised of ours, and Unavailable
    when anything else went wrong there.
    """

    def __init__(self, contributor_id: str, node_id: str) -> None:
        from share_compute_actors.machine.contributor import start_contributor

        self._id = contributor_id
        with _translated(contributor_id):
            self._actor = start_contributor(contributor_id, node_id)

    async def is_alive(self) -> bool:
        """Return whether its process answers."""
        try:
            with _translated(self._id):
                await self._actor.__ray_ready__.remote()
        except ContributorLost:
            return False
        return True

    async def probe(self, limits: Mapping[str, Any]) -> tuple[Device, ...]:
        """Measure the devices that are lent."""
        from share_compute_actors.machine.contributor import read_devices

        with _translated(self._id):
            text = await self._actor.probe.remote(
                memory_bytes=limits["memory_bytes"],
                cpu_threads=limits["cpu_threads"],
                device=limits["device"],
            )
        return read_devices(text)

    async def measure_links(self, peers: Sequence[tuple[str, Machine]]) -> tuple[Link, ...]:
        """Measure the links to these; leaves out those that are gone."""
        from share_compute_actors.machine.contributor import read_links

        actors = [(peer_id, peer._actor) for peer_id, peer in peers if isinstance(peer, RayMachine)]  # noqa: SLF001 - its own kind
        with _translated(self._id):
            text = await self._actor.measure_links.remote(actors)
        return read_links(text)

    def kill(self) -> None:
        """End the actor."""
        import ray

        if ray.is_initialized():
            ray.kill(self._actor)


@contextmanager
def _translated(contributor_id: str) -> Iterator[None]:
    from ray.exceptions import RayError, RayTaskError

    try:
        yield
    except RayError as failure:
        cause = failure.cause if isinstance(failure, RayTaskError) else None
        if isinstance(cause, ShareComputeError):
            raise cause from failure
        if cause is not None:
            raise Unavailable(
                f"it could not be measured: {type(cause).__name__}: {cause}",
                mend="run share-compute doctor there",
                machine=contributor_id,
            ) from failure
        raise ContributorLost(
            f"it was lost while it was measured: {first_line(failure)}",
            mend="let it join again",
            machine=contributor_id,
        ) from failure
