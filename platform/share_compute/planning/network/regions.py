"""Estimates all links from the few that were measured: machines with similar links form a region.

1. If a link was measured in both directions, or repeatedly, the worst latency and the worst bandwidth count.
2. Machines at one address are one host. Hosts with similar links are clustered into regions.
3. All links between two regions, or between the hosts of one region, get the median of the measurements there. Without
   measurements they get the latency and the bandwidth of the best path through other regions or the Ray head. Without
   such a path they have 0 bytes/s.
4. In a region of one host, links get the median of the measurements inside the host. Without measurements they get
   `HOST_LATENCY_S` and `HOST_BYTES_PER_S`.
5. If no link was measured at all, all machines are assumed to share a LAN.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from share_compute.planning.network.blocks import fit
from share_compute.planning.network.clustering import Clusters
from share_compute.planning.network.network import Floats, Network
from share_compute.topology import HEAD, Topology, absurdities

ALIKE = 2.0
"""Maximum ratio of the latencies, and of the bandwidths, of similar links."""
MOST_REGIONS = 256
"""Maximum number of regions. If there are more, hosts are clustered again with twice the similarity factor.

Tables grow with the square of the number of regions.
"""
ASSUMED_LATENCY_S = 1e-3
"""Assumed latency if no link was measured: that of a LAN."""
ASSUMED_BYTES_PER_S = 1e8
"""Assumed bandwidth if no link was measured: about that of a 1 Gbit/s LAN."""
HOST_LATENCY_S = 2e-4
"""Assumed latency between machines of one host, if no link of that host was measured."""
HOST_BYTES_PER_S = 1e9
"""Assumed bandwidth between machines of one host, if no link of that host was measured."""
_MESSAGE_BYTES = 1e6
"""Size in bytes of the message by whose transfer time paths are compared."""
_HEAD = -1
_COARSEST = 2.0**10
"""Similarity factor beyond which clustering is not repeated, even with more than `MOST_REGIONS` regions."""


class _Measured(NamedTuple):
    """A measured link. Its ends are indices of machines, or -1 for the head; the smaller number comes first."""

    latency_s: float
    bytes_per_s: float
    one: int
    other: int


def complete(topology: Topology) -> Network:
    """Return the estimated links between all machines of a topology.

    Measurements with impossible figures, and links to machines that are not in the topology, are ignored.

    Args:
        topology: machines, and the links that were measured.
    """
    links = _merged(topology)
    count = len(topology.contributors)
    if not links:
        return Network(
            region=np.zeros(count, dtype=np.int64),
            latency_s=np.full((1, 1), ASSUMED_LATENCY_S),
            bytes_per_s=np.full((1, 1), ASSUMED_BYTES_PER_S),
            assumed=count > 1,
        )
    hosts = _hosts(topology)
    region, lost = _regions(hosts, links)
    latency_s, bytes_per_s = _tables(
        region, hosts, [link for link in links if link.one == _HEAD or region[link.one] != lost]
    )
    return Network(region=region, latency_s=latency_s, bytes_per_s=bytes_per_s)


def _merged(topology: Topology) -> list[_Measured]:
    """Return each measured link once, with its worst latency and bandwidth; the lowest latency first."""
    places = {machine.id: index for index, machine in enumerate(topology.contributors)} | {HEAD: _HEAD}
    worst: dict[tuple[int, int], tuple[float, float]] = {}
    for link in topology.links:
        ends = places.get(link.source), places.get(link.target)
        if ends[0] is None or ends[1] is None or any(absurdities(link)):
            continue
        pair = min(ends[0], ends[1]), max(ends[0], ends[1])
        latency_s, bytes_per_s = worst.get(pair, (0.0, math.inf))
        worst[pair] = max(latency_s, link.latency_s), min(bytes_per_s, link.bytes_per_s)
    found = [_Measured(latency_s, rate, *pair) for pair, (latency_s, rate) in worst.items()]
    return sorted(found, key=lambda link: (link.latency_s, -link.bytes_per_s, link.one, link.other))


def _hosts(topology: Topology) -> list[int]:
    """Return for each machine the index of the first machine at its address; its own index if it has no address."""
    first: dict[str, int] = {}
    return [
        first.setdefault(machine.address, index) if machine.address else index
        for index, machine in enumerate(topology.contributors)
    ]


def _regions(hosts: list[int], links: list[_Measured]) -> tuple[NDArray[np.int64], int]:
    """Return the region of each machine, and the region of machines that fit no other region (-1 if there is none).

    Regions are numbered in the order of their first machines.
    """
    between = [
        _Measured(latency_s, rate, *sorted((hosts[one] if one >= 0 else _HEAD, hosts[other])))
        for latency_s, rate, one, other in links
    ]
    between = [link for link in between if link.one != link.other]
    home = _home_of_head(between)
    evidence = [link for link in between if (link.one, link.other) != (_HEAD, home)]
    linked = {end for link in between for end in (link.one, link.other)}
    linked |= {host for machine, host in enumerate(hosts) if machine != host}
    factor, least_evidence = ALIKE, 2
    while True:
        clusters = Clusters(sorted(linked - {_HEAD}), factor)
        for latency_s, rate, one, other in evidence:
            clusters.add(one, other, latency_s, rate)
        groups = clusters.join(
            (link.one, link.other, link.latency_s) for link in evidence if link.one != _HEAD
        )
        label = fit(groups, evidence, factor, least_evidence, MOST_REGIONS)
        roots = [label.get(host) for host in hosts]
        if len(set(roots)) <= MOST_REGIONS or factor > _COARSEST:
            break
        factor, least_evidence = factor * ALIKE, 1
    # Hosts that are not in `linked` have no label. These hosts and all groups beyond the limit share one region.
    sensible = dict.fromkeys(root for root in roots if root is not None)
    fits = len(set(roots)) <= MOST_REGIONS
    kept = set(list(sensible)[: MOST_REGIONS if fits else MOST_REGIONS - 1])
    numbers: dict[int | None, int] = {}
    for root in roots:
        numbers.setdefault(root if root in kept else None, len(numbers))
    region = np.array([numbers[root if root in kept else None] for root in roots], dtype=np.int64)
    return region, numbers.get(None, -1)


def _home_of_head(between: Iterable[_Measured]) -> int | None:
    """Return the host with a far better link to the head than all other hosts; None if there is none.

    The head probably runs on this host. The link between host and head then crosses no network, so it must not affect
    the regions.
    """
    paths = [link for link in between if link.one == _HEAD]
    if len(paths) < 2:
        return None
    best, second = paths[:2]
    is_far_better = (
        best.bytes_per_s > 0
        and best.bytes_per_s >= second.bytes_per_s
        and (second.latency_s > ALIKE * best.latency_s or best.bytes_per_s > ALIKE * second.bytes_per_s)
    )
    return best.other if is_far_better else None


def _tables(region: NDArray[np.int64], hosts: list[int], links: list[_Measured]) -> tuple[Floats, Floats]:
    """Return latency and bandwidth ``[regions, regions]``."""
    count = int(region.max()) + 1
    found: dict[tuple[int, int], list[_Measured]] = defaultdict(list)
    inside_host: dict[int, list[_Measured]] = defaultdict(list)
    for link in links:
        one = count if link.one == _HEAD else int(region[link.one])
        other = int(region[link.other])
        if link.one != _HEAD and hosts[link.one] == hosts[link.other]:
            inside_host[one].append(link)
        else:
            found[min(one, other), max(one, other)].append(link)
    hosts_of: dict[int, set[int]] = defaultdict(set)
    for machine, host in enumerate(hosts):
        hosts_of[int(region[machine])].add(host)
    # The head is one additional region in the tables while paths are searched.
    latency_s = np.full((count + 1, count + 1), np.inf)
    bytes_per_s = np.zeros((count + 1, count + 1))
    is_measured = np.zeros((count + 1, count + 1), dtype=bool)
    for (one, other), seen in found.items():
        for pair in ((one, other), (other, one)):
            latency_s[pair], bytes_per_s[pair] = _median(seen)
            is_measured[pair] = True
    for number, within in hosts_of.items():
        if len(within) == 1:
            seen = inside_host[number]
            latency_s[number, number], bytes_per_s[number, number] = (
                _median(seen) if seen else (HOST_LATENCY_S, HOST_BYTES_PER_S)
            )
            is_measured[number, number] = True
    _fill_by_paths(latency_s, bytes_per_s, is_measured)
    latency_s[~np.isfinite(latency_s)] = 0.0
    return latency_s[:count, :count].copy(), bytes_per_s[:count, :count].copy()


def _median(links: Iterable[_Measured]) -> tuple[float, float]:
    latencies, rates, _, _ = zip(*links, strict=True)
    return float(median(latencies)), float(median(rates))


def _fill_by_paths(latency_s: Floats, bytes_per_s: Floats, is_measured: NDArray[np.bool_]) -> None:
    """Give each unmeasured pair of regions its best path through other regions or the head (Floyd-Warshall)."""
    cost_s = _message_s(latency_s, bytes_per_s)
    for via in range(len(cost_s)):
        latency = latency_s[:, via, None] + latency_s[None, via, :]
        rate = np.minimum(bytes_per_s[:, via, None], bytes_per_s[None, via, :])
        cost = _message_s(latency, rate)
        better = (cost < cost_s) & ~is_measured
        latency_s[better], bytes_per_s[better], cost_s[better] = (
            latency[better],
            rate[better],
            cost[better],
        )


def _message_s(latency_s: Floats, bytes_per_s: Floats) -> Floats:
    """Return the seconds that a message of `_MESSAGE_BYTES` takes; infinite for a bandwidth of 0."""
    with np.errstate(over="ignore"):
        carried_s = np.divide(
            _MESSAGE_BYTES, bytes_per_s, out=np.full_like(bytes_per_s, np.inf), where=bytes_per_s > 0
        )
    return latency_s + carried_s
