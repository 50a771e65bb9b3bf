"""Partitioning strategies for far machines: pipelines with short links, or with few cuts between locations."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final

import numpy as np

from share_compute.errors import PlanInfeasible
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.network.network import Floats
from share_compute.planning.search.grouping import MOST_LAYERS, group
from share_compute.planning.search.partitioning import (
    Candidate,
    Partition,
    PartitioningStrategy,
    by_speed,
    check_counts,
)
from share_compute.planning.search.paths import MOST_GROUPS, Members, PathSearch
from share_compute.planning.search.problem import SearchProblem
from share_compute.planning.search.strategies import nameless_cost, nameless_partitions
from share_compute.topology import Contributor, Topology

_FINALISTS: Final = 4
"""Maximum number of paths along which layers are divided."""


class PathPartitioning(PartitioningStrategy):
    """Base of strategies that place the stages along a shortest path; layers are divided for the shortest step."""

    @abstractmethod
    def groupings(self, problem: SearchProblem) -> Iterator[list[Members]]:
        """Yield lists of the machines of possible stages; a later list is used only if the earlier ones fail."""

    @abstractmethod
    def lengths(self, cost: TrainingCost, groups: Sequence[Members]) -> Floats:
        """Return the lengths of cuts between two groups ``[quantities, groups, groups]``; see `PathSearch.lengths`."""

    def place(self, problem: SearchProblem) -> list[Candidate]:
        """Return the layouts along the shortest paths on which the model fits; an empty list if there is none.

        Raises:
            PlanInfeasible: the requested numbers are impossible; see `check_counts`.
        """
        cost = problem.cost
        check_counts(problem)
        deep = group(cost, problem.stages or 0) if cost.num_layers > MOST_LAYERS else None
        for possible in self.groupings(problem):
            groups = possible[:MOST_GROUPS]
            if not groups:
                return []
            run = PathSearch(deep.coarse if deep else cost, groups, self.lengths(cost, groups))
            found: list[Candidate] = []
            for path in run.shortest(problem.stages)[:_FINALISTS]:
                if found and path.rounded_length > found[0].penalty:
                    break
                layout = run.cut(path)
                if layout is not None and deep is not None:
                    layout = deep.refined(layout)
                if layout is not None and cost.is_feasible(layout):
                    found.append(Candidate(layout, penalty=path.rounded_length))
            if found:
                return found
        return []

    def partition(self, topology: Topology) -> list[Partition]:
        """Return partitions for a generic model of equal layers, with one machine in each stage.

        Raises:
            PlanInfeasible: no path over usable links joins the machines.
        """
        if not topology.contributors:
            return []
        cost = nameless_cost(topology)
        stages = min(cost.num_machines, cost.num_layers)
        candidates = self.place(SearchProblem(cost, stages=stages, members_per_stage=1))
        if not candidates:
            raise PlanInfeasible(
                f"no path over usable links joins {stages} machines",
                hint="look at share-compute topology, or use parallelism.strategy: auto",
            )
        return nameless_partitions(cost, candidates[0].layout)


class LatencyPartitioning(PathPartitioning):
    """Minimizes the sum of the latencies between neighboring stages, then the step time."""

    def groupings(self, problem: SearchProblem) -> Iterator[list[Members]]:
        """Yield each machine as a group; with several members per stage, group machines of similar speed."""
        cost, size = problem.cost, problem.members_per_stage or 1
        alike = defaultdict[tuple[str, int], list[int]](list)
        for machine in _able(cost):
            alike[cost.kinds[machine], int(cost.network.region[machine]) if size > 1 else 0].append(machine)
        yield _fastest_first(cost, [part for machines in alike.values() for part in _parts(machines, size)])

    def lengths(self, cost: TrainingCost, groups: Sequence[Members]) -> Floats:
        """Return the largest latency between a machine of one group and a machine of the other, in seconds."""
        return _latencies_s(cost, groups)[np.newaxis]


class LocationPartitioning(PathPartitioning):
    """Keeps the machines of a location in one stage, and cuts the model between as few locations as possible.

    The location of a machine is its label ``site``, or else ``location``; a machine without such a label is its own
    location. A location gets several stages only if the job requests more stages, or if memory requires more. Among the
    pipelines with the fewest cuts between locations, the smallest sum of latencies wins.
    """

    def groupings(self, problem: SearchProblem) -> Iterator[list[Members]]:
        """Yield the machines of each location and kind of device as one group, then smaller and smaller parts."""
        cost, size = problem.cost, problem.members_per_stage
        alike = defaultdict[tuple[str, str], list[int]](list)
        for machine in _able(cost):
            alike[_location(cost.topology.contributors[machine]), cost.kinds[machine]].append(machine)
        parts = list(alike.values())
        if size is not None:
            yield _fastest_first(cost, [part for machines in parts for part in _parts(machines, size)])
            return
        while len(parts) < (problem.stages or 0) and (largest := max(parts, key=len, default=[]))[1:]:
            parts.remove(largest)
            parts += _halves(largest)
        while True:
            yield _fastest_first(cost, [_working(cost, part) for part in parts])
            if all(len(part) == 1 for part in parts):
                return
            parts = [half for part in parts for half in _halves(part)]

    def lengths(self, cost: TrainingCost, groups: Sequence[Members]) -> Floats:
        """Return 1 between locations and 0 within one, followed by the latencies of `LatencyPartitioning` in s."""
        places = [_location(cost.topology.contributors[members[0]]) for members in groups]
        crossing = np.array([[one != other for other in places] for one in places])
        return np.stack([crossing, _latencies_s(cost, groups)])

    def place(self, problem: SearchProblem) -> list[Candidate]:
        """Return the layouts along the shortest paths; those that split fewer locations are preferred.

        If the job sets neither stages nor members, the first quantity of the penalty is the number of stages beyond one
        for each location.

        Raises:
            PlanInfeasible: the requested numbers are impossible; see `check_counts`.
        """
        candidates, machines = super().place(problem), problem.cost.topology.contributors
        if problem.stages is not None or problem.members_per_stage is not None:
            return candidates
        found = []
        for candidate in candidates:
            stages = candidate.layout.stages
            places = {_location(machines[stage.members[0]]) for stage in stages}
            found.append(candidate._replace(penalty=(len(stages) - len(places), *candidate.penalty)))
        return found


def _location(machine: Contributor) -> str:
    """Return the location of a machine; its id if its owner did not give it one."""
    named = machine.labels.get("site") or machine.labels.get("location")
    return f"at {named}" if named else f"of {machine.id}"


def _latencies_s(cost: TrainingCost, groups: Sequence[Members]) -> Floats:
    """Return the largest latency between machines of two groups in seconds ``[groups, groups]``."""
    latency_s = _latency_s(cost, [machine for members in groups for machine in members])
    edges = np.cumsum([0, *map(len, groups)])[:-1]
    return np.maximum.reduceat(np.maximum.reduceat(latency_s, edges, axis=0), edges, axis=1)


def _latency_s(cost: TrainingCost, machines: Sequence[int]) -> Floats:
    """Return the latency between machines in seconds ``[machines, machines]``: measured, or else that of their regions.

    If a link was measured several times, the largest latency counts. The latency of a dead link is infinite.
    """
    network, measured_s = cost.network, cost.topology.measured_latency_s
    region = network.region[list(machines)]
    found = np.where(
        network.bytes_per_s[np.ix_(region, region)] > 0, network.latency_s[np.ix_(region, region)], np.inf
    )
    ids = [cost.topology.contributors[machine].id for machine in machines]
    index = {machine_id: place for place, machine_id in enumerate(ids)}
    pairs = combinations(sorted(ids), 2) if len(ids) ** 2 < 2 * len(measured_s) else iter(measured_s)
    for pair in pairs:
        one, other, latency_s = index.get(pair[0]), index.get(pair[1]), measured_s.get(pair)
        if one is not None and other is not None and latency_s is not None and np.isfinite(found[one, other]):
            found[one, other] = found[other, one] = latency_s
    return found


def _able(cost: TrainingCost) -> list[int]:
    """Return the machines that can hold a layer, the fastest first."""
    return [machine for machine in by_speed(cost) if cost.memory_bytes[machine] >= cost.least_bytes]


def _fastest_first(cost: TrainingCost, groups: list[Members]) -> list[Members]:
    machines = cost.topology.contributors
    return sorted(
        groups,
        key=lambda members: (
            -sum(machines[member].flops_per_s() for member in members),
            machines[members[0]].id,
        ),
    )


def _parts(machines: Sequence[int], size: int) -> list[Members]:
    """Return parts of ``size`` machines each; the slowest machines may remain unused."""
    return [tuple(machines[at : at + size]) for at in range(0, len(machines) - size + 1, size)]


def _halves(machines: list[int]) -> list[list[int]]:
    """Return two halves of about the same speed; the list itself if it has one machine."""
    return [machines[::2], machines[1::2]] if len(machines) > 1 else [machines]


def _working(cost: TrainingCost, machines: Sequence[int]) -> Members:
    """Return the fastest machines that all get a microbatch when they share one stage with all layers."""
    members = tuple(machines[: cost.workload.microbatches])
    while len(members) > 1 and cost.shares(members, 0, cost.num_layers) is None:
        members = members[:-1]
    return members
