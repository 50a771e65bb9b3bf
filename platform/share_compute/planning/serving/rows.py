"""Finds the row of machines with the smallest sum of costs: shortest paths over machines and layers.

A row is a sequence of machines that covers all layers. Each machine takes layers [start, stop) at the cost of its
stage, and sends its output to the next machine at the cost of the hop. Machines of one region have the same hops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from share_compute.planning.network.network import Floats

Row = list[tuple[int, int, int]]
"""List of (machine, its first layer, one past its last layer), covering all layers in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Costs of stages and links, whose sum over a row is minimised; infinite for forbidden stages and links."""

    stage: Callable[[int], Floats]
    """Cost of layers [start, stop) on a machine: ``[layers + 1, layers + 1]``, infinite where stop <= start."""
    hop: Floats
    """Cost of a hop between machines of two regions, at the cut before a layer: ``[regions, regions, layers + 1]``."""
    back: Floats
    """Cost from the last machine back to the first, if they differ: ``[regions, regions]``."""
    region: NDArray[np.int64]
    """Region of each machine ``[machines]``."""


def best_row(sums: Sums, machines: Sequence[int], stages: int | None = None) -> Row | None:
    """Return the row with the smallest sum among all orders of all subsets; None if no sum is finite.

    This is dynamic programming over subsets, as for the traveling salesman problem (Held and Karp 1962).

    Args:
        sums: costs of stages and links.
        machines: machines that may be in the row, each once.
        stages: exact number of machines in the row; None allows any.
    """
    if not machines:
        return None
    costs = {machine: sums.stage(machine) for machine in machines}
    best: tuple[float, Row] | None = None
    for region in sorted({int(sums.region[machine]) for machine in machines}):
        found = _Subsets(sums, costs, region).best(stages)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return None if best is None else best[1]


class _Subsets:
    """Search for rows whose first machine is in a given region, so that the way back to it has a known cost."""

    def __init__(self, sums: Sums, stages: dict[int, Floats], first_region: int) -> None:
        self._sums, self._first = sums, first_region
        self._machines = list(stages)
        self._stages = list(stages.values())
        self._regions = [int(sums.region[machine]) for machine in self._machines]
        self._cuts = self._stages[0].shape[0]
        count = len(self._machines)
        # [subset, last machine, layers covered]: smallest sum of a row that uses exactly the machines of the subset.
        self._sum = np.full((1 << count, count, self._cuts), np.inf)

    def best(self, stages: int | None) -> tuple[float, Row] | None:
        """Return the smallest sum and its row; None if no sum is finite."""
        count = len(self._machines)
        most = min(count, self._cuts - 1) if stages is None else stages
        ends: list[tuple[float, int, int]] = []
        for size in range(1, most + 1):
            subsets = np.array(
                [sum(1 << one for one in chosen) for chosen in combinations(range(count), size)]
            )
            for last in range(count):
                with_last = subsets[subsets >> last & 1 == 1]
                if size == 1:
                    if self._regions[last] == self._first:
                        self._sum[with_last, last] = self._stages[last][0]
                else:
                    arrived = self._arrivals(with_last ^ (1 << last), last).min(axis=1)
                    self._sum[with_last, last] = (arrived[:, :, None] + self._stages[last]).min(axis=1)
                if stages in (None, size):
                    back = self._sums.back[self._regions[last], self._first] if size > 1 else 0.0
                    finished = self._sum[with_last, last, -1] + back
                    place = int(finished.argmin())
                    ends.append((float(finished[place]), int(with_last[place]), last))
        total, subset, last = min(ends)
        return (total, self._trace(subset, last)) if np.isfinite(total) else None

    def _arrivals(self, before: NDArray[np.int64], last: int) -> Floats:
        """Return the sums of rows over subsets ``before`` plus the hop to ``last``, ``[subsets, machines, cuts]``."""
        hops = self._sums.hop[self._regions, self._regions[last]]
        return self._sum[before] + hops

    def _trace(self, subset: int, last: int) -> Row:
        row: Row = []
        stop = self._cuts - 1
        while subset & (subset - 1):
            before = subset ^ (1 << last)
            arrivals = self._arrivals(np.array([before]), last)[0]
            start = int((arrivals.min(axis=0) + self._stages[last][:, stop]).argmin())
            row.append((self._machines[last], start, stop))
            subset, last, stop = before, int(arrivals[:, start].argmin()), start
        row.append((self._machines[last], 0, stop))
        return row[::-1]


def best_row_in_order(sums: Sums, order: Sequence[int]) -> Row | None:
    """Return the row with the smallest sum whose machines are in the given order; None if no sum is finite.

    Machines may be left out. The cost from the last machine back to the first is ignored.
    """
    regions, cuts = sums.hop.shape[0], sums.hop.shape[2]
    # [region, cut]: smallest sum of a row that ends in this region at this cut, and the position of its last machine.
    ended = np.full((regions, cuts), np.inf)
    ender = np.full((regions, cuts), -1)
    starts, befores = np.zeros((len(order), cuts), dtype=np.int64), np.full((len(order), cuts), -1)
    every = np.arange(cuts)
    for place, machine in enumerate(order):
        region = int(sums.region[machine])
        arrivals = ended + sums.hop[:, region]
        nearest = arrivals.argmin(axis=0)
        arrived = arrivals[nearest, every]
        arrived[0] = 0.0
        totals = arrived[:, None] + sums.stage(machine)
        starts[place] = totals.argmin(axis=0)
        befores[place] = ender[nearest, every][starts[place]]
        reached = totals[starts[place], every]
        better = reached < ended[region]
        ended[region, better], ender[region, better] = reached[better], place
    region = int(ended[:, -1].argmin())
    if not np.isfinite(ended[region, -1]):
        return None
    row: Row = []
    place, stop = int(ender[region, -1]), cuts - 1
    while True:
        start = int(starts[place, stop])
        row.append((order[place], start, stop))
        if start == 0:
            return row[::-1]
        place, stop = int(befores[place, stop]), start
