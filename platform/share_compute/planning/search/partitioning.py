"""Partitioning strategies: rules that divide a model among machines.

A strategy defines `PartitioningStrategy.partition`. It may override `PartitioningStrategy.place`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from itertools import accumulate, pairwise
from typing import NamedTuple

from share_compute.errors import PlanInfeasible, UserError
from share_compute.files.strict import nearest
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.search.problem import SearchProblem
from share_compute.protocol.schedule import even_shares
from share_compute.shards import Shard
from share_compute.topology import Contributor, Device, Topology

ENTRY_POINTS = "share_compute.partitioning"


@dataclass(frozen=True, slots=True)
class Partition:
    """A contributor's interval [start, end) of a model's layers, as fractions of the number of layers."""

    contributor_id: str
    start: float
    end: float


class Candidate(NamedTuple):
    """A layout that a strategy proposes."""

    layout: Layout
    exact: bool = False
    """Whether the strategy proved that no layout that meets the request has a shorter step by the cost formula."""
    penalty: tuple[float, ...] = ()
    """Quantities that the strategy minimizes, one after the other, before the step time."""


class PartitioningStrategy(ABC):
    """A rule that divides a model among machines, registered as a ``share_compute.partitioning`` entry point."""

    @abstractmethod
    def partition(self, topology: Topology) -> list[Partition]:
        """Return one partition for each contributor that gets layers, in pipeline order, covering [0, 1].

        The list is empty if there are no contributors.
        """

    def place(self, problem: SearchProblem) -> list[Candidate]:
        """Return candidate layouts, the most promising first; an empty list if there is none.

        The default implementation forms stages of the fastest machines, and passes each stage to `partition` as one
        contributor. It returns one layout, without checking that it fits. If ``problem.stages`` is None, it forms as
        many stages as machines and layers allow.

        Raises:
            PlanInfeasible: too few machines, layers or microbatches for the requested numbers, or a stage would mix
                kinds of devices.
            UserError: `partition` returned no partitions, or they do not cover [0, 1] in order.
        """
        stages = _form_stages(problem)
        contributors = problem.cost.topology.contributors
        machines = [[contributors[machine] for machine in members] for members in stages]
        partitions = self.partition(
            Topology(tuple(_as_one(index, members) for index, members in enumerate(machines)))
        )
        shards = map_partitions_to_shards(partitions, problem.cost.num_layers, "model")
        layouts = []
        for partition, shard in zip(partitions, shards, strict=True):
            members = tuple(stages[int(partition.contributor_id)])
            shares = problem.cost.shares(members, shard.start, shard.stop)
            if (
                shares is None
            ):  # a member is so slow that it gets no microbatch, but this strategy uses all members
                shares = even_shares(problem.cost.workload.microbatches, len(members))
            layouts.append(StageLayout(shard.start, shard.stop, members, shares))
        return [Candidate(Layout(tuple(layouts)))]


def _form_stages(problem: SearchProblem) -> list[list[int]]:
    """Return the indices of each stage's machines: the fastest machines, grouped by kind of device and region."""
    cost = problem.cost
    size = problem.members_per_stage or 1
    available, num_layers = cost.num_machines, cost.num_layers
    count = problem.stages or max(1, min(available // size, num_layers))
    check_counts(replace(problem, stages=count))
    if size == 1 and available == count:
        return [[machine] for machine in range(available)]
    fastest = by_speed(cost)
    if size == 1:
        return [[machine] for machine in fastest[:count]]
    # The members of a stage sum their gradients, which requires devices of one kind and is faster inside a region.
    alike = sorted(
        fastest[: count * size], key=lambda machine: (cost.kinds[machine], cost.network.region[machine])
    )
    groups = [alike[start : start + size] for start in range(0, len(alike), size)]
    if any(len({cost.kinds[machine] for machine in group}) > 1 for group in groups):
        raise PlanInfeasible(
            "a stage would mix different kinds of devices",
            hint="let machines join with --device cpu, or set parallelism.members_per_stage: 1",
        )
    return groups


def by_speed(cost: TrainingCost) -> list[int]:
    """Return the indices of all machines, the fastest first; ties go by id."""
    machines = cost.topology.contributors
    return sorted(
        range(len(machines)), key=lambda index: (-machines[index].flops_per_s(), machines[index].id)
    )


def check_counts(problem: SearchProblem) -> None:
    """Raise PlanInfeasible if the requested numbers are impossible regardless of memory and links."""
    machines, layers = problem.cost.num_machines, problem.cost.num_layers
    microbatches = problem.cost.workload.microbatches
    stages, members_per_stage = problem.stages or 1, problem.members_per_stage or 1
    if machines == 0:
        raise PlanInfeasible(
            "no machine is ready",
            hint="let machines join: share-compute invite",
            details={"machines_needed": stages * members_per_stage, "machines_ready": 0},
        )
    if members_per_stage > microbatches:
        raise PlanInfeasible(
            f"{members_per_stage} members share each stage, but a step has only {microbatches} microbatches",
            hint=f"set training.microbatches, and training.batch_size with it, to {members_per_stage} or more",
            details={"members_per_stage": members_per_stage, "microbatches": microbatches},
        )
    if stages > layers:
        raise PlanInfeasible(
            f"{stages} stages cannot share {layers} layers: each needs at least one",
            hint=f"ask for at most {layers} stages",
            details={"stages": stages, "layers": layers},
        )
    needed = stages * members_per_stage
    if machines < needed:
        raise PlanInfeasible(
            f"{stages} stages of {members_per_stage} need {needed} machines; {machines} are ready",
            hint="let more machines join, or ask for fewer stages or members",
            details={"machines_needed": needed, "machines_ready": machines},
        )


def _as_one(index: int, members: list[Contributor]) -> Contributor:
    """Return a machine that stands for a stage, with the sum of the members' speeds and their smallest memory."""
    device = Device(
        kind="cpu",
        name=f"stage {index + 1}",
        memory_bytes=min(machine.memory_bytes for machine in members),
        flops_per_s={"float32": sum(machine.flops_per_s() for machine in members)},
    )
    return Contributor(id=str(index), name=device.name, devices=(device,))


def _proportional(order: list[Contributor], weights: list[float]) -> list[Partition]:
    if not any(weights):
        weights = [1.0] * len(order)
    # Dividing running sums, instead of adding shares, makes the last edge exactly 1 and keeps the edges in order.
    sums = [0.0, *accumulate(weights)]
    edges = [part / sums[-1] for part in sums] if order else [0.0]
    return [
        Partition(machine.id, start, end)
        for machine, (start, end) in zip(order, pairwise(edges), strict=True)
    ]


class UniformPartitioning(PartitioningStrategy):
    """Equal shares for all contributors, in the order of the topology."""

    def partition(self, topology: Topology) -> list[Partition]:
        """Return equal partitions."""
        order = list(topology.contributors)
        return _proportional(order, [1.0] * len(order))


class MemoryWeightedPartitioning(PartitioningStrategy):
    """Shares in proportion to lent memory, largest first (the ring memory-weighted partitioning of exo)."""

    def partition(self, topology: Topology) -> list[Partition]:
        """Return partitions in proportion to lent memory."""
        order = sorted(topology.contributors, key=lambda machine: (-machine.memory_bytes, machine.id))
        return _proportional(order, [float(machine.memory_bytes) for machine in order])


class ComputeWeightedPartitioning(PartitioningStrategy):
    """Shares in proportion to float32 FLOP/s, in the order of the topology."""

    def partition(self, topology: Topology) -> list[Partition]:
        """Return partitions in proportion to float32 FLOP/s; equal ones if no machine has a speed."""
        order = list(topology.contributors)
        return _proportional(order, [machine.flops_per_s() for machine in order])


def map_partitions_to_shards(partitions: list[Partition], num_layers: int, model_id: str) -> list[Shard]:
    """Return one shard for each partition: contiguous, without gap, overlap or empty shard.

    Each edge is rounded to a layer boundary, and moved if a shard would have no layer.

    Args:
        partitions: partitions in pipeline order, covering [0, 1].
        num_layers: number of layers of the model.
        model_id: model id that is copied into each shard.

    Raises:
        PlanInfeasible: there are more partitions than layers.
        UserError: there are no partitions or no layers, or the partitions do not cover [0, 1] in order.
    """
    count = len(partitions)
    if not partitions or num_layers < 1:
        raise UserError(
            f"nothing to map: {count} partitions, {num_layers} layers",
            hint="let at least one machine join, and give the model at least one layer",
        )
    edges = [partition.start for partition in partitions] + [partitions[-1].end]
    touching = all(left.end == right.start for left, right in pairwise(partitions))
    rising = all(left <= right for left, right in pairwise(edges))
    if not touching or not rising or edges[0] != 0 or edges[-1] != 1:
        raise UserError(
            "partitions must cover [0, 1] in order, without gap or overlap",
            hint="fix the partitioning strategy, or choose another in parallelism.strategy",
        )
    if count > num_layers:
        raise PlanInfeasible(
            f"{count} stages cannot share {num_layers} layers: each needs at least one",
            hint=f"ask for at most {num_layers} stages",
            details={"stages": count, "layers": num_layers},
        )
    cuts = [0]
    for index, edge in enumerate(edges[1:], start=1):
        least, most = cuts[-1] + 1, num_layers - (count - index)
        cuts.append(min(max(round(edge * num_layers), least), most))
    return [Shard(model_id, start, stop, num_layers) for start, stop in pairwise(cuts)]


def strategy_names() -> list[str]:
    """Return the names of all installed strategies."""
    return sorted(point.name for point in entry_points(group=ENTRY_POINTS))


def load_strategy(name: str) -> PartitioningStrategy:
    """Return the strategy with this name.

    Raises:
        UserError: there is no such strategy.
    """
    for point in entry_points(group=ENTRY_POINTS, name=name):
        strategy: PartitioningStrategy = point.load()()
        return strategy
    names = strategy_names()
    guess = nearest(name, names)
    raise UserError(
        f"unknown partitioning strategy {name!r}" + (f"; did you mean {guess!r}?" if guess else ""),
        hint=f"use one of {', '.join(names)}",
    )
