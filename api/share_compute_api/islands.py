"""The islands of the pool: machines whose links are alike, and what is between them; as the planner takes them.

With many machines this takes a second, so it is worked out beside the requests: meanwhile they get what was true
before, and are told so.
"""

from __future__ import annotations

import asyncio
import time
from itertools import combinations
from typing import Any

from fastapi.concurrency import run_in_threadpool

from share_compute.jobs.states import ContributorState
from share_compute.planning.network import Network
from share_compute.planning.regions import complete
from share_compute.store import ContributorRecord, Store
from share_compute_api.pool_schemas import Island, IslandLink, Islands
from share_compute_api.supervision.live_topology import live_topology

_HERE = (ContributorState.ready, ContributorState.draining)
_AT_ONCE = 150
"""Machines up to which a request waits for the answer, which takes some tens of milliseconds."""
_REST = 20.0
"""Times as long as it takes, it rests: a large pool whose machines come and go must not keep a core busy with this."""
_ALL_LINKS = 6
"""Islands up to which each pair has a link in the answer; of more, those of the best tree are left."""


class IslandMap:
    """Keeps the islands of the machines that are here.

    Args:
        store: where the machines are.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known = Islands(islands=(), links=(), is_current=True, is_assumed=False)
        self._key: list[tuple[str, str | None, Any]] = []
        self._rests_until = 0.0
        self._working: asyncio.Future[None] | None = None

    async def get(self) -> Islands:
        """Return the islands; where `Islands.is_current` is false, better ones are being worked out."""
        found = await run_in_threadpool(self._store.pool.links, _HERE)
        if found == self._key:
            return self._known
        is_rested = len(found) <= _AT_ONCE or time.monotonic() >= self._rests_until
        if is_rested and (self._working is None or self._working.done()):
            self._working = asyncio.ensure_future(run_in_threadpool(self._work_out, found))
            # Where nothing is known yet, nothing can be answered instead.
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
    """Return the islands of these machines, in the order of the first machine of each."""
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
    """Return what is between islands; of many, the tree of the best links, by which all are joined."""
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
