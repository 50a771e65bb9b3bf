"""Partitioning strategies that search for layouts with a short step time by the cost formula."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar, Literal

from share_compute.errors import PlanInfeasible
from share_compute.models.profiles.profile import LayerProfile, ModelProfile, QuadraticGrowth
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout
from share_compute.planning.network.regions import complete
from share_compute.planning.search.partitioning import (
    Candidate,
    ComputeWeightedPartitioning,
    MemoryWeightedPartitioning,
    Partition,
    PartitioningStrategy,
    UniformPartitioning,
    check_counts,
)
from share_compute.planning.search.problem import SearchProblem
from share_compute.planning.search.search import search
from share_compute.specification.workload import TrainingWorkload
from share_compute.topology import MOST_BYTES, Contributor, Topology

NOMINAL_FLOPS_PER_S = 1e9
"""Assumed FLOP/s of every machine if no machine's speed was measured."""
_FINALISTS = 16
_NAMELESS_LAYERS = 64
_NAMELESS = LayerProfile(
    parameters=0,
    forward_flops=QuadraticGrowth(linear=1e8),
    backward_flops=QuadraticGrowth(linear=2e8),
    boundary_numbers=QuadraticGrowth(linear=4096),
)
"""Generic layer; `_NAMELESS_LAYERS` of them have about the FLOPs of a model with 3 billion parameters."""


class SearchingStrategy(PartitioningStrategy):
    """Base class of strategies that search for the layout with the shortest step time by the cost formula."""

    method: ClassVar[Literal["auto", "dynamic_programming", "recursive"]]

    def place(self, problem: SearchProblem) -> list[Candidate]:
        """Return the best layouts of the search, best by the cost formula first; an empty list if none was found.

        Raises:
            PlanInfeasible: the requested numbers are impossible; see `check_counts`.
        """
        cost = problem.cost
        check_counts(problem)
        found = search(
            cost,
            stages=problem.stages,
            members_per_stage=problem.members_per_stage,
            method=self.method,
            finalists=_FINALISTS,
        )
        return [Candidate(layout, exact) for layout, _, exact in found]

    def partition(self, topology: Topology) -> list[Partition]:
        """Return partitions for a generic model of equal layers, with one machine in each stage."""
        if not topology.contributors:
            return []
        cost = nameless_cost(topology)
        best = search(cost, members_per_stage=1, method=self.method, finalists=1)[0].layout
        return nameless_partitions(cost, best)


class DynamicProgrammingPartitioning(SearchingStrategy):
    """Searches layouts of the machines in the order of the topology; some machines may get no layers.

    For few machines and layers, the result is the best layout of this order by the cost formula.
    """

    method = "dynamic_programming"


class RecursivePartitioning(SearchingStrategy):
    """Divides machines and layers by recursive bisection."""

    method = "recursive"


class AutoPartitioning(SearchingStrategy):
    """Searches all orders of few machines exactly, and of many machines heuristically.

    The layouts of the other built-in strategies are candidates, too, because one of them may have a shorter simulated
    step.
    """

    method = "auto"

    def place(self, problem: SearchProblem) -> list[Candidate]:
        """Return the layouts of the search, followed by further layouts of the other built-in strategies.

        Raises:
            PlanInfeasible: the requested numbers are impossible; see `check_counts`.
        """
        candidates = self.search(problem)
        known = {candidate.layout for candidate in candidates}
        return candidates + [each for each in self.simpler(problem) if each.layout not in known]

    def search(self, problem: SearchProblem) -> list[Candidate]:
        """Return the layouts of the search, without those of other strategies.

        Raises:
            PlanInfeasible: the requested numbers are impossible; see `check_counts`.
        """
        return super().place(problem)

    def simpler(self, problem: SearchProblem, *, in_order: bool = True) -> list[Candidate]:
        """Return the layouts of the other built-in strategies that fit and need no dead link, each once.

        Args:
            problem: the job on its machines.
            in_order: whether to include dynamic programming, which is slow for many machines.
        """
        layouts = dict.fromkeys(
            layout
            for rival in _RIVALS
            if in_order or not isinstance(rival, DynamicProgrammingPartitioning)
            for layout in _proposed(rival, problem)
        )
        return [Candidate(layout) for layout in layouts]


def _proposed(rival: PartitioningStrategy, problem: SearchProblem) -> list[Layout]:
    """Return a strategy's proposals that fit into memory and need no dead link."""
    try:
        layouts = [candidate.layout for candidate in rival.place(problem)]
    except PlanInfeasible:
        return []  # this strategy cannot form the requested stages here
    return [layout for layout in layouts if problem.cost.is_feasible(layout)]


_RIVALS: tuple[PartitioningStrategy, ...] = (
    DynamicProgrammingPartitioning(),
    RecursivePartitioning(),
    ComputeWeightedPartitioning(),
    MemoryWeightedPartitioning(),
    UniformPartitioning(),
)


def nameless_cost(topology: Topology) -> TrainingCost:
    """Return the cost model of a generic model of equal layers, on machines with boundless memory."""
    topology = _with_boundless_memory(with_nominal_speeds(topology))
    profile = ModelProfile(layers=(_NAMELESS,) * _NAMELESS_LAYERS)
    workload = TrainingWorkload(batch_size=16, microbatches=16, sequence_length=512)
    return TrainingCost(profile, topology, complete(topology), workload)


def nameless_partitions(cost: TrainingCost, layout: Layout) -> list[Partition]:
    """Return the partitions of a layout with one machine in each stage."""
    return [
        Partition(
            cost.topology.contributors[stage.members[0]].id,
            stage.start / cost.num_layers,
            stage.stop / cost.num_layers,
        )
        for stage in layout.stages
    ]


def is_measured(machine: Contributor) -> bool:
    """Return whether the machine's FLOP/s is known: above 0 and finite."""
    return 0 < machine.flops_per_s() < math.inf


def with_nominal_speeds(topology: Topology) -> Topology:
    """Return the topology without machines of unknown speed.

    If no machine's speed is known, return all machines, with the speed `NOMINAL_FLOPS_PER_S`.
    """
    measured = tuple(machine for machine in topology.contributors if is_measured(machine))
    if measured:
        return replace(topology, contributors=measured)
    return replace(topology, contributors=tuple(map(_nominal, topology.contributors)))


def _with_boundless_memory(topology: Topology) -> Topology:
    machines = (
        replace(
            machine, devices=tuple(replace(device, memory_bytes=MOST_BYTES) for device in machine.devices)
        )
        for machine in topology.contributors
    )
    return replace(topology, contributors=tuple(machines))


def _nominal(machine: Contributor) -> Contributor:
    devices = tuple(
        replace(device, flops_per_s={"float32": NOMINAL_FLOPS_PER_S}, memory_bytes_per_s=0.0)
        for device in machine.devices
    )
    return replace(machine, devices=devices)
