"""Agglomerative clustering of hosts: groups are joined along good links (union-find) if their links are similar."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

LEAST_LATENCY_S = 5e-4
"""Floor for latencies: smaller ones are raised to it, since delays in busy processes exceed them."""
LEAST_BYTES_PER_S = 1.0
"""Floor for bandwidths: smaller ones, such as 0 of a dead link, are raised to it, because their logarithm is needed."""


class _Average(NamedTuple):
    """Geometric mean of the latencies and bandwidths of links, kept as sums of logarithms."""

    links: int
    latency: float
    rate: float

    def plus(self, other: _Average | None) -> _Average:
        if other is None:
            return self
        return _Average(self.links + other.links, self.latency + other.latency, self.rate + other.rate)

    def distance(self, other: _Average) -> float:
        return max(
            abs(self.latency / self.links - other.latency / other.links),
            abs(self.rate / self.links - other.rate / other.links),
        )


class Clusters:
    """Agglomerative clustering of hosts. At first each host is its own group.

    Args:
        hosts: numbers of the hosts, ascending. Links may also end at other numbers, such as that of the head. These
            join no group.
        factor: maximum ratio of mean latencies, and of mean bandwidths, at which groups of links count as similar.
    """

    def __init__(self, hosts: Iterable[int], factor: float) -> None:
        self._tolerance = math.log(factor)
        self._parent = {host: host for host in hosts}
        self._inside: dict[int, _Average] = {}
        self._across: dict[int, dict[int, _Average]] = {host: {} for host in self._parent}
        self._least_latency_s = dict.fromkeys(self._parent, math.inf)

    def add(self, one: int, other: int, latency_s: float, bytes_per_s: float) -> None:
        """Add one measured link. Add all links before calling `join`."""
        link = _Average(
            1, math.log(max(latency_s, LEAST_LATENCY_S)), math.log(max(bytes_per_s, LEAST_BYTES_PER_S))
        )
        for here, there in ((one, other), (other, one)):
            across = self._across.setdefault(here, {})
            across[there] = link.plus(across.get(there))
            if there in self._parent and here in self._parent:
                self._least_latency_s[here] = min(
                    self._least_latency_s[here], max(latency_s, LEAST_LATENCY_S)
                )

    def find(self, host: int) -> int:
        """Return the host that represents the group of ``host``."""
        root = host
        while (above := self._parent.get(root, root)) != root:
            root = above
        while host != root:
            self._parent[host], host = root, self._parent[host]
        return root

    def join(self, links: Iterable[tuple[int, int, float]]) -> list[list[int]]:
        """Join groups along links, and return all groups, the larger ones first.

        Args:
            links: (one host, other host, latency in s), the best link first.
        """
        for one, other, latency_s in links:
            self._join_along(one, other, latency_s)
        groups: dict[int, list[int]] = {}
        for host in self._parent:
            groups.setdefault(self.find(host), []).append(host)
        return sorted(groups.values(), key=lambda group: (-len(group), group))

    def _join_along(self, one: int, other: int, latency_s: float) -> None:
        nearest_s = min(self._least_latency_s[one], self._least_latency_s[other])
        first, second = self.find(one), self.find(other)
        # If a link has far more latency than the fastest link of either host, it leads to another group.
        if (
            first != second
            and math.log(max(latency_s, LEAST_LATENCY_S) / nearest_s) <= self._tolerance
            and self._are_alike(first, second)
        ):
            self._join(first, second)

    def _are_alike(self, one: int, other: int) -> bool:
        """Return whether two groups have similar links.

        Compare the mean of the links inside each group, between the two groups, and to each third group or other end
        that both have links to.
        """
        inside = [self._inside.get(one), self._inside.get(other), self._across[one].get(other)]
        known = [average for average in inside if average is not None]
        if not all(average.distance(known[0]) <= self._tolerance for average in known[1:]):
            return False
        fewer, more = sorted((self._across[one], self._across[other]), key=len)
        return all(
            average.distance(more[third]) <= self._tolerance
            for third, average in fewer.items()
            if third in more
        )

    def _join(self, one: int, other: int) -> None:
        # Merging the smaller table into the larger one keeps the total time of all joins nearly linear.
        gone, keep = sorted((one, other), key=lambda root: (len(self._across[root]), -root))
        between = self._across[keep].pop(gone, None)
        self._across[gone].pop(keep, None)
        averages = [self._inside.pop(keep, None), self._inside.pop(gone, None), between]
        known = [average for average in averages if average is not None]
        if known:
            total = known[0]
            for average in known[1:]:
                total = total.plus(average)
            self._inside[keep] = total
        table = self._across[keep]
        for third, average in self._across.pop(gone).items():
            table[third] = average.plus(table.get(third))
            theirs = self._across[third]
            theirs[keep] = theirs.pop(gone).plus(theirs.get(keep))
        self._parent[gone] = keep
