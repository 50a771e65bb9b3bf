"""Predicted time of the sums of gradients inside a stage, for each algorithm of `share_compute.protocol.collectives`.

The traffic of an algorithm is that of its routes, for members with one run of microbatches each. The time is ::

    latencies of the longest route, up and down
    + the largest of: bytes that a member sends inside its site / bandwidth,
                      bytes that a member receives inside its site / bandwidth,
                      bytes from one site to another / bandwidth between them

So all members of a site share its link to another site, like machines behind one uplink. Inside a site each member has
its own link. A site is a region of the network.

In a single region, the time of ``sharded`` is 2 * latency + 2 * (n - 1) / n * bytes / bandwidth for n members. If sums
are compressed, the time is latency + (n - 1) * compressed bytes of a run / bandwidth.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from operator import add
from typing import NamedTuple

import numpy as np

from share_compute.device_kinds import KINDS
from share_compute.planning.network.network import Floats, Network
from share_compute.protocol.collectives import (
    ALGORITHMS,
    Algorithm,
    Route,
    Traffic,
    by_site,
    parts_of,
    routes,
    spread,
    spread_traffic,
    traffic,
)
from share_compute.protocol.tree import Node, SummationTree

_WITH_NCCL = frozenset(kind for kind, facts in KINDS.items() if facts.collectives == "nccl")
"""Kinds of devices whose members exchange shares directly."""


class SumTime(NamedTuple):
    """Time and traffic of one algorithm, for tensors of any size.

    Sizes are those of the whole tensor; with compression, those of one compressed run of it.
    """

    algorithm: Algorithm
    latency_s: float
    s_per_byte: float
    received: float
    """Data that the member with the most traffic receives, in multiples of the size."""
    crossing: float
    """Data that the site with the most traffic sends to other sites, in multiples of the size."""

    def of(self, size_bytes: float) -> float:
        """Return the seconds for a tensor; infinite if a link is dead."""
        return self.latency_s + size_bytes * self.s_per_byte if math.isfinite(self.s_per_byte) else math.inf


class GradientSums:
    """Predicts the algorithms for stages of a network; results are kept.

    Args:
        network: links between all machines.
        wanted: algorithm of the job, or ``auto``.
        is_compressed: whether members exchange compressed runs.
    """

    def __init__(self, network: Network, wanted: str, *, is_compressed: bool) -> None:
        self._network, self._is_compressed = network, is_compressed
        self._wanted = wanted
        self._known: dict[tuple[Algorithm, tuple[int, ...]], SumTime] = {}

    def sites(self, machines: Sequence[int]) -> tuple[int, ...]:
        """Return the site number of each machine; sites are numbered in the order of first appearance."""
        return _numbered(self._regions(machines))

    def _regions(self, machines: Sequence[int]) -> tuple[int, ...]:
        return tuple(int(self._network.region[machine]) for machine in machines)

    def choices(self, machines: Sequence[int], kind: str) -> list[SumTime]:
        """Return the algorithms among which the job lets the planner choose.

        In a single region, ``sharded`` is the fastest for any size, so ``auto`` leaves out the others.

        Args:
            machines: members of the stage, at least 2.
            kind: kind of their devices. On GPUs, NCCL exchanges shares directly, whatever the job says.
        """
        regions = self._regions(machines)
        algorithms: Sequence[Algorithm] = [each for each in ALGORITHMS if each == self._wanted]
        if kind in _WITH_NCCL or (self._wanted == "auto" and len(set(regions)) == 1):
            algorithms = ("sharded",)
        return [self._time(algorithm, regions) for algorithm in algorithms or ALGORITHMS]

    def all(self, machines: Sequence[int], kind: str) -> list[SumTime]:
        """Return all algorithms that these machines can use."""
        regions = self._regions(machines)
        algorithms: Sequence[Algorithm] = ("sharded",) if kind in _WITH_NCCL else ALGORITHMS
        return [self._time(algorithm, regions) for algorithm in algorithms]

    def best(self, machines: Sequence[int], kind: str, size_bytes: float) -> SumTime:
        """Return the fastest algorithm of `choices` for a tensor; of equal ones, the one with the least traffic."""
        return min(
            self.choices(machines, kind),
            key=lambda time: (time.of(size_bytes), time.crossing, time.received, time.algorithm),
        )

    def _time(self, algorithm: Algorithm, regions: tuple[int, ...]) -> SumTime:
        key = algorithm, regions
        if key not in self._known:
            self._known[key] = self._predict(algorithm, regions)
        return self._known[key]

    def _predict(self, algorithm: Algorithm, regions: tuple[int, ...]) -> SumTime:
        count, is_flat = len(regions), len(set(regions)) == 1
        if is_flat and algorithm in ("sharded", "hierarchical"):
            latency_s, rate = self._network.between(regions[0], regions[0])
            moved = count - 1 if self._is_compressed else 2 * (count - 1) / count
            hops = 1 if self._is_compressed else 2
            return SumTime(algorithm, hops * latency_s, moved / rate if rate > 0 else math.inf, moved, 0.0)
        sites = _numbered(regions)
        sent = traffic_of(algorithm, sites, is_compressed=self._is_compressed)
        latency_s = self._latency_s(algorithm, sites, regions)
        received: dict[int, float] = defaultdict(float)
        crossing: dict[int, float] = defaultdict(float)
        busy_s: dict[tuple[str, int, int], float] = defaultdict(float)
        for (source, target), size in sent.items():
            here, there = regions[source], regions[target]
            rate = self._network.between(here, there)[1]
            taken_s = size / rate if rate > 0 else math.inf
            received[target] += size
            if here == there:
                busy_s["from", source, 0] += taken_s
                busy_s["to", target, 0] += taken_s
            else:
                crossing[here] += size
                busy_s["between", here, there] += taken_s
        return SumTime(
            algorithm,
            latency_s,
            max(busy_s.values()),
            max(received.values()),
            max(crossing.values(), default=0.0),
        )

    def _latency_s(self, algorithm: Algorithm, sites: tuple[int, ...], regions: Sequence[int]) -> float:
        """Return the latencies of the longest route: up (only without compression) and down."""
        if algorithm == "ring":
            order = by_site(sites)
            hops = [
                self._network.between(regions[one], regions[other])[0]
                for one, other in zip(order, [*order[1:], order[0]], strict=True)
            ]
            # A share never crosses the link from its root on its way up, nor the link to its root on its way down.
            skipped = hops if self._is_compressed else list(map(add, hops, [hops[-1], *hops[:-1]]))
            return (1 if self._is_compressed else 2) * sum(hops) - min(skipped)
        found = _routes(algorithm, sites, is_compressed=self._is_compressed)
        return max(
            sum(
                max(self._way_s(rank, parents, regions) for rank in range(len(regions)))
                for parents in ((route.down,) if self._is_compressed else (route.up, route.down))
            )
            for route in found
        )

    def _way_s(self, rank: int, parents: Sequence[int], regions: Sequence[int]) -> float:
        seconds = 0.0
        while (parent := parents[rank]) != rank:
            seconds += self._network.between(regions[rank], regions[parent])[0]
            rank = parent
        return seconds


def _numbered(regions: Sequence[int]) -> tuple[int, ...]:
    """Return the number of each region; regions are numbered in the order of first appearance."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(region, len(numbers)) for region in regions)


def _held(count: int) -> tuple[SummationTree, list[tuple[Node]]]:
    """Return a tree with one run for each of ``count`` members."""
    tree = SummationTree((1,) * count)
    return tree, [(node,) for node in tree.sums_of_runs]


@lru_cache(maxsize=1024)
def _routes(algorithm: Algorithm, sites: tuple[int, ...], *, is_compressed: bool) -> tuple[Route, ...]:
    """Return the routes of an algorithm for members with one run each."""
    if is_compressed:
        return spread(algorithm, sites)
    tree, held = _held(len(sites))
    return routes(algorithm, held, tree, sites)


@lru_cache(maxsize=1024)
def traffic_of(algorithm: Algorithm, sites: tuple[int, ...], *, is_compressed: bool = False) -> Traffic:
    """Return the data that each member sends to each other member, in multiples of the tensor's size."""
    if algorithm == "ring" and list(sites) == sorted(sites) and not is_compressed:
        return _around(len(sites))
    found = _routes(algorithm, sites, is_compressed=is_compressed)
    if is_compressed:
        return spread_traffic(found)
    tree, held = _held(len(sites))
    return traffic(parts_of(route, held, tree) for route in found)


def _around(count: int) -> Traffic:
    """Return the traffic of ``ring`` for members in the order of their runs; much faster than `traffic` for many.

    A share that began at member s arrives at member m with the sums of runs s to m. The number of partial sums is the
    number of maximal tree nodes in this range, or in its two parts if it wraps around.
    """
    partial = np.zeros((count + 1, count + 1))
    _count_nodes(partial, 0, count)
    sent = {}
    for member in range(count):
        to_here = partial[:, member + 1]
        moved = to_here[: member + 1].sum()
        if member + 1 < count:
            over = partial[member + 2 : count, count]
            moved += over.sum() + len(over) * to_here[0]
        else:
            moved -= to_here[0]  # the root of this share is this member
        sent[member, (member + 1) % count] = float(moved + count - 1) / count
    return sent


def _count_nodes(partial: Floats, start: int, stop: int) -> None:
    """Fill a table ``[start, stop]`` with the number of maximal nodes in each range, for the subtree of a range."""
    if stop - start > 1:
        middle = start + (stop - start + 1) // 2
        _count_nodes(partial, start, middle)
        _count_nodes(partial, middle, stop)
        left, right = partial[start:middle, middle], partial[middle, middle + 1 : stop + 1]
        partial[start:middle, middle + 1 : stop + 1] = left[:, None] + right
    partial[start, stop] = 1
