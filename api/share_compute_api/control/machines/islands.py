"""Computes islands (groups of machines with similar links) and the links between them, with the planner's functions.

With many machines the computation takes about a second, so it runs in the background. Meanwhile requests get the
previous islands, marked as not current.
"""

from __future__ import annotations

import asyncio
import time
from itertools import combinations
from typing import Any

from fastapi.concurrency import run_in_threadpool

from share_compute.lifecycle.states import ContributorState
from share_compute.planning.network.network import Network
from share_compute.planning.network.regions import complete
from share_compute.store import ContributorRecord, Store
from share_compute_api.control.machines.live_topology import live_topology
from share_compute_api.schemas.cluster import Island, IslandLink, Islands

_HERE = (ContributorState.ready, ContributorState.draining)
_AT_ONCE = 150
"""Maximum number of machines for which a request waits for the computation, which takes tens of milliseconds."""
_REST = 20.0
"""Pause after a computation, as a multiple of its duration. Limits the CPU time when machines join and leave often."""
_ALL_LINKS = 6
"""Maximum number of islands for which the answer has a link for each pair; with more islands it has a spanning tree."""


class IslandMap:
    """Computes and caches the islands of the present machines.

    Args:
        store: the store with the machines.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known = Islands(islands=(), links=(), is_current=True, is_assumed=False)
        self._key: list[tuple[str, str | None, Any]] = []
        self._rests_until = 0.0
        self._working: asyncio.Future[None] | None = None

    async def get(self) -> Islands:
        """Return the islands. If `Islands.is_current` is false, they are outdated; later calls return newer islands."""
        found = await run_in_threadpool(self._store.cluster.links, _HERE)
        if found == self._key:
            return self._known
        is_rested = len(found) <= _AT_ONCE or time.monotonic() >= self._rests_until
        if is_rested and (self._working is None or self._working.done()):
            self._working = asyncio.ensure_future(run_in_threadpool(self._work_out, found))
            # Wait if the computation is short, or if there is no earlier result to return.
            if len(found) <= _AT_ONCE or not self._known.islands:
                await asyncio.shield(self._working)
                return self._known
        return self._known.model_copy(update={"is_current": False})

    def _work_out(self, key: list[tuple[str, str | None, Any]]) -> None:
        begun = time.monotonic()
        measured = {machine for machine, _, _ in key}
        records = [record for record in self._store.contributors.list(_HERE) if record.id in measured]
        self._known, self._key = islands_of(records), key
        self._rests_until = time.monotonic() + _REST * (time.monotonic() - begun)


def islands_of(records: list[ContributorRecord]) -> Islands:
    """Return the islands of these machines, ordered by each island's first machine in ``records``."""
    topology = live_topology(records)
    machines = [machine.id for machine in topology.contributors]
    if not machines:
        return Islands(islands=(), links=(), is_current=True, is_assumed=False)
    network = complete(topology)
    members: dict[int, list[str]] = {}
    for machine, region in zip(machines, network.region.tolist(), strict=True):
        members.setdefault(region, []).append(machine)
    islands = []
    for region, inside in members.items():
        latency_s, bytes_per_s = network.between(region, region)
        has_links = len(inside) > 1 and not network.assumed
        islands.append(
            Island(
                id=inside[0],
                machines=tuple(inside),
                latency_s=latency_s if has_links else None,
                bytes_per_s=bytes_per_s if has_links else None,
            )
        )
    links = _links(network, {region: inside[0] for region, inside in members.items()})
    return Islands(islands=tuple(islands), links=links, is_current=True, is_assumed=network.assumed)


def _links(network: Network, names: dict[int, str]) -> tuple[IslandLink, ...]:
    """Return the links between islands: all pairs, or, with many islands, the maximum spanning tree by bandwidth."""
    pairs = sorted(
        combinations(names, 2),
        key=lambda pair: (-network.bytes_per_s[pair], network.latency_s[pair], pair),
    )
    if len(names) > _ALL_LINKS:
        pairs = _tree(names, pairs)
    found = []
    for one, other in pairs:
        latency_s, bytes_per_s = network.between(one, other)
        found.append(
            IslandLink(one=names[one], other=names[other], latency_s=latency_s, bytes_per_s=bytes_per_s)
        )
    return tuple(found)


def _tree(names: dict[int, str], pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    root = {region: region for region in names}

    def find(region: int) -> int:
        while root[region] != region:
            region = root[region]
        return region

    kept = []
    for one, other in pairs:
        if find(one) != find(other):
            root[find(one)] = find(other)
            kept.append((one, other))
    return kept
