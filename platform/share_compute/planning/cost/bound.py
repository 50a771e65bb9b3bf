"""Lower bound on the step time that `share_compute.planning.cost.cost` predicts for any layout on given machines.

For a given number of stages on a given set of regions, the bound is the largest of the bounds in this list. The result
is the minimum over all numbers of stages and over the clusters of a single-linkage clustering of the regions.

- Work: all machines together do the work of all layers and microbatches. The bound assumes that layers can be divided
  anywhere and that no machine waits.
- Fill: one microbatch passes through all layers, each on the machine that is fastest for it. It crosses each link
  between neighbouring stages twice: once as an activation and once as a gradient.
- Gradient sums: a stage of several machines must sum its gradients within the time of a step. This limits the stage's
  trained parameters, and so its share of the work.
- If no two machines can share a stage: each machine begins only when one microbatch has passed through the machines
  before it. At most as many microbatches are in flight as there are stages, and each link carries all microbatches.
- Memory: the smallest number of machines that together hold the state (weights, gradients and optimizer state) is a
  lower bound on the number of stages.

For a layout on one machine, the bound is its step time by the formula of `share_compute.planning.cost.cost`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import solo
from share_compute.planning.cost.options import Ints, Options
from share_compute.planning.network.network import Floats


class _Group(NamedTuple):
    """A set of regions joined by links."""

    regions: frozenset[int]
    links_s: tuple[float, ...]
    """One-way times of a microbatch over the edges of a minimum spanning tree of the regions, ascending."""


def lower_bound_s(cost: TrainingCost) -> float:
    """Return a lower bound in seconds on the step time of any layout; infinite if `Options.usable` is empty."""
    usable = np.array(Options(cost).usable, dtype=np.int64)
    if not len(usable):
        return math.inf
    relaxation = _Relaxation(cost, usable)
    return min(relaxation.bound_s(group) for group in _groups(cost, usable))


class _Relaxation:
    def __init__(self, cost: TrainingCost, usable: Ints) -> None:
        self._cost, self._usable = cost, usable
        self._count = cost.workload.microbatches
        cells = np.diff(cost.forward_s[usable] + cost.backward_s[usable], axis=1)
        least = cells.min(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            fastest = np.where((cells > 0) & (least > 0), least / cells, 0.0).max(axis=1)
            per_parameter = np.where(least > 0, least / np.diff(cost.trained), 0.0).max()
        self._rates: Floats = np.where(fastest > 0, fastest, 1.0)
        self._smallest_s = cells.min(axis=1)
        # With any algorithm, some member sends or receives at least the size of the tensor.
        self._held_s = self._count * float(per_parameter) / cost.summed_bytes
        update = (self._rates * cost.update_s_per_parameter[usable]).min()
        self._pass_s = float(least.sum())
        self._work_s = self._count * self._pass_s + float(cost.trained[-1] * update)
        self._call_s = float(cost.call_s[usable].min())
        updated = 0.0 if cost.workload.shares_optimizer else None
        state = float(cost.state_bytes(cost.parameters[-1], cost.trained[-1], updated))
        largest = np.cumsum(np.sort(cost.memory_bytes[usable])[::-1])
        self._fewest_stages = int((largest < state).sum()) + 1

    def bound_s(self, group: _Group) -> float:
        """Return a lower bound on the step time of layouts on all regions of a group, or on one of its machines."""
        inside = np.isin(self._cost.network.region[self._usable], list(group.regions))
        machines = self._usable[inside]
        bound = min(self._alone_s(int(machine)) for machine in machines)
        if len(machines) > 1:
            bound = min(bound, self._together_s(machines, inside, group))
        return bound

    def _alone_s(self, machine: int) -> float:
        layout = solo(machine, self._cost.num_layers, self._count)
        return self._cost.step_s(layout) if self._cost.fits(layout) else math.inf

    def _together_s(self, machines: Ints, inside: np.ndarray, group: _Group) -> float:
        """Return a lower bound on the step time of layouts on several machines, for any number of stages."""
        most = min(len(machines), self._cost.num_layers)
        stages = np.arange(1, most + 1)
        order = np.lexsort((-self._rates[inside], self._smallest_s[inside]))
        rates, smallest = self._rates[inside][order], self._smallest_s[inside][order]
        perfect_s = float(np.maximum(self._work_s / np.cumsum(rates), smallest).min())
        fastest = np.sort(rates)[::-1][:most]
        fill_s = self._pass_s + 2 * self._links_s(machines, group, most)
        needed_s = np.maximum(fill_s, perfect_s)
        network = self._cost.network
        if self._may_share(machines):
            regions = sorted(group.regions)
            rate = float(network.bytes_per_s[regions, regions].max())
            carried = self._held_s * rate if rate > 0 else 0.0
            speed = np.cumsum(np.maximum(fastest, carried))
            needed_s = np.maximum(needed_s, self._count * self._pass_s / speed) + self._call_s
        else:
            staggered = np.cumsum(fastest * (1 - 1 / self._count) ** np.arange(most))
            carry_s = _hops(self._cost, np.array(sorted(group.regions)), latency=False).min()
            carried_s = np.where(stages > 1, (self._count - 1) * carry_s if self._count > 1 else 0.0, 0.0)
            turns = (self._count - 1) // stages
            waits_s = np.maximum(np.where(turns > 0, np.maximum(turns, 1) * fill_s, 0.0), carried_s)
            work_s = self._count * self._pass_s / staggered
            needed_s = np.maximum(np.maximum(needed_s, work_s) + self._call_s, fill_s + waits_s)
        needed_s[: self._fewest_stages - 1] = math.inf
        return float(needed_s.min())

    def _links_s(self, machines: Ints, group: _Group, most: int) -> Floats:
        """Return a lower bound on the one-way time of a microbatch over all links between stages, shape ``[most]``.

        Index ``i`` holds the bound for ``i + 1`` stages.
        """
        regions, counts = np.unique(self._cost.network.region[machines], return_counts=True)
        links = list(group.links_s)
        if counts.max() > 1:
            near = _hops(self._cost, regions)
            shortest = min([*links[:1], *near.diagonal()[counts > 1]])
            # Several hops may use the fastest link, but one hop is at least as slow as the slowest tree edge.
            links = sorted([shortest] * (most - 1) + links[-1:])
        crossed = np.concatenate([[0.0], np.cumsum(links)])[:most]
        # A layout on all regions of the group uses a link at least as slow as the slowest edge of the spanning tree.
        times: Floats = np.maximum(crossed, max(group.links_s, default=0.0))
        return times

    def _may_share(self, machines: Ints) -> bool:
        seen = {(self._cost.kinds[one], int(self._cost.network.region[one])) for one in machines}
        return self._count > 1 and len(seen) < len(machines)


def _hops(cost: TrainingCost, regions: Ints, *, latency: bool = True) -> Floats:
    """Return lower bounds on the one-way seconds of a microbatch between every two regions, ``[regions, regions]``.

    A microbatch counts as the smallest tensor that can cross a boundary between stages. Times are infinite on dead
    links.
    """
    size = float(cost.link_bytes[1:-1].min()) if cost.num_layers > 1 else math.inf
    rates = cost.network.bytes_per_s[np.ix_(regions, regions)]
    with np.errstate(divide="ignore", invalid="ignore"):
        times: Floats = np.where(rates > 0, size / rates, np.inf)
    return times + cost.network.latency_s[np.ix_(regions, regions)] if latency else times


def _groups(cost: TrainingCost, usable: Ints) -> list[_Group]:
    """Return the clusters of a single-linkage clustering of the usable machines' regions.

    The single regions come first. Each edge of a minimum spanning tree, the fastest first, then adds the union of the
    two clusters that it joins.
    """
    regions = np.unique(cost.network.region[usable])
    groups = [_Group(frozenset({int(region)}), ()) for region in regions]
    member = {int(region): group for region, group in zip(regions, groups, strict=True)}
    for hop_s, one, other in sorted(_spanning_tree(_hops(cost, regions))):
        left, right = member[int(regions[one])], member[int(regions[other])]
        joined = _Group(left.regions | right.regions, (*sorted(left.links_s + right.links_s), hop_s))
        groups.append(joined)
        member.update(dict.fromkeys(joined.regions, joined))
    return groups


def _spanning_tree(hops: Floats) -> list[tuple[float, int, int]]:
    """Return the edges (time, one region, other region) of a minimum spanning tree (Prim's algorithm)."""
    count = len(hops)
    nearest, origin, edges = hops[0].copy(), np.zeros(count, dtype=np.int64), []
    outside = np.ones(count, dtype=bool)
    outside[0] = False
    for _ in range(count - 1):
        chosen = int(np.flatnonzero(outside)[np.argmin(nearest[outside])])
        edges.append((float(nearest[chosen]), int(origin[chosen]), chosen))
        outside[chosen] = False
        closer = hops[chosen] < nearest
        nearest, origin = np.where(closer, hops[chosen], nearest), np.where(closer, chosen, origin)
    return edges
