"""Cut a model into contiguous shares: strategies give partitions, a mapping makes shards of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import accumulate, pairwise

from share_compute.errors import PlanInfeasible, UserError
from share_compute.strict import nearest
from share_compute.topology import Contributor, Topology

ENTRY_POINTS = "share_compute.partitioning"


@dataclass(frozen=True, slots=True)
class Partition:
    """The interval [start, end) of a model, as shares of its layers, given to one contributor."""

    contributor_id: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Shard:
    """The layers [start, stop) of a model that has ``num_layers`` of them."""

    model_id: str
    start: int
    stop: int
    num_layers: int

    @property
    def is_first(self) -> bool:
        """Whether it embeds."""
        return self.start == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the final norm and the head."""
        return self.stop == self.num_layers

    def __len__(self) -> int:
        return self.stop - self.start


class PartitioningStrategy(ABC):
    """A rule that shares a model out; found by name among the ``share_compute.partitioning`` entry points."""

    @abstractmethod
    def partition(self, topology: Topology) -> list[Partition]:
        """Return one partition for each contributor that gets work, in pipeline order, covering [0, 1].

        No contributors, no partitions.
        """


def _proportional(order: list[Contributor], weights: list[float]) -> list[Partition]:
    if not any(weights):
        weights = [1.0] * len(order)
    # Sums are divided, not shares added: so the edges never fall, and the last is exactly 1.
    sums = [0.0, *accumulate(weights)]
    edges = [part / sums[-1] for part in sums] if order else [0.0]
    return [
        Partition(machine.id, start, end)
        for machine, (start, end) in zip(order, pairwise(edges), strict=True)
    ]


class UniformPartitioning(PartitioningStrategy):
    """Every contributor gets the same share, in the order they joined."""

    def partition(self, topology: Topology) -> list[Partition]:
        """Return equal partitions."""
        order = list(topology.contributors)
        return _proportional(order, [1.0] * len(order))


class MemoryWeightedPartitioning(PartitioningStrategy):
    """A ring in order of memory, largest first; shares in proportion to memory (the rule of exo)."""

    def partition(self, topology: Topology) -> list[Partition]:
        """Return partitions in proportion to lent memory."""
        order = sorted(topology.contributors, key=lambda machine: (-machine.memory_bytes, machine.id))
        return _proportional(order, [float(machine.memory_bytes) for machine in order])


class ComputeWeightedPartitioning(PartitioningStrategy):
    """Shares in proportion to measured float32 FLOP/s, in the order they joined."""

    def partition(self, topology: Topology) -> list[Partition]:
        """Return partitions in proportion to measured speed."""
        order = list(topology.contributors)
        return _proportional(order, [machine.flops_per_s() for machine in order])


def map_partitions_to_shards(partitions: list[Partition], num_layers: int, model_id: str) -> list[Shard]:
    """Make one shard of each partition: contiguous, without gap, overlap or empty shard.

    Each edge goes to the nearest layer boundary, then moves as little as needed to leave every shard a layer.

    Args:
        partitions: in pipeline order, covering [0, 1].
        num_layers: layers of the model.
        model_id: copied into each shard.

    Raises:
        PlanInfeasible: there are more partitions than layers.
        UserError: no partitions, or they do not cover [0, 1] in order.
    """
    count = len(partitions)
    if not partitions or num_layers < 1:
        raise UserError(
            f"nothing to map: {count} partitions, {num_layers} layers",
            mend="let at least one machine join, and give the model at least one layer",
        )
    edges = [partition.start for partition in partitions] + [partitions[-1].end]
    touching = all(left.end == right.start for left, right in pairwise(partitions))
    rising = all(left <= right for left, right in pairwise(edges))
    if not touching or not rising or edges[0] != 0 or edges[-1] != 1:
        raise UserError(
            "partitions must cover [0, 1] in order, without gap or overlap",
            mend="mend the partitioning strategy, or choose another in parallelism.strategy",
        )
    if count > num_layers:
        raise PlanInfeasible(
            f"{count} pools cannot share {num_layers} layers: each needs at least one",
            mend=f"ask for at most {num_layers} pools",
            details={"pools": count, "layers": num_layers},
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
    """Return the strategy of that name.

    Raises:
        UserError: no such strategy; names the nearest.
    """
    for point in entry_points(group=ENTRY_POINTS, name=name):
        strategy: PartitioningStrategy = point.load()()
        return strategy
    names = strategy_names()
    guess = nearest(name, names)
    raise UserError(
        f"unknown partitioning strategy {name!r}" + (f"; did you mean {guess!r}?" if guess else ""),
        mend=f"use one of {', '.join(names)}",
    )
