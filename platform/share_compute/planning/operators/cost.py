"""Cost model of a sharded layer: seconds of compute, of collectives, and of redistributions between operators.

Collectives are predicted by the formulas of rings (Thakur et al., 2005, "Optimization of collective communication
operations in MPICH"), for n devices, V bytes, latency a and bandwidth b of a link:

- AllGather and ReduceScatter: (n - 1) a + (n - 1) / n · V / b
- AllReduce: both of them
- AllToAll: (n - 1) a + (n - 1) / n² · V / b
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from share_compute.planning.operators.graph import Operator, OperatorGraph
from share_compute.planning.operators.strategies import (
    PARTIAL,
    REPLICATE,
    Strategy,
    StrategyOptions,
    TensorLayout,
)

Collective = Literal["AllGather", "AllReduce", "AllToAll", "ReduceScatter"]
Costs = NDArray[np.float64]
_BACKWARD = 2
"""Time of a backward pass in forward passes: gradients of inputs and of weights, each as large as the forward."""
_UPDATE_PASSES = 7
"""Times that an update by Adam reads or writes memory of a parameter's size: weight, gradient and two moments."""
_WHOLE = TensorLayout(REPLICATE, REPLICATE)
_VIEWS = {"reshape", "fork", "input"}
"""Kinds of operators that run no kernel."""


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Equal devices of one machine, with equal links between them."""

    devices: int
    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    link_latency_s: float
    overhead_s: float = 0.0
    """Fixed cost of one operation."""

    def collective_s(self, collective: Collective, size_bytes: int) -> float:
        """Return the seconds of a collective over all devices on a tensor of ``size_bytes`` as a whole."""
        count = self.devices
        if count == 1:
            return 0.0
        share = (count - 1) / count * size_bytes / self.link_bytes_per_s
        latency_s = (count - 1) * self.link_latency_s
        match collective:
            case "AllReduce":
                return 2 * (latency_s + share)
            case "AllToAll":
                return latency_s + share / count
            case _:
                return latency_s + share


@dataclass(frozen=True, slots=True)
class Workload:
    """Use of a layer in a training step."""

    microbatches: int = 1
    """Microbatches of one step: gradients of parameters are summed over devices, and updated, once in each step."""
    trains: bool = True
    """Whether there is a backward pass."""


class OperatorCost(NamedTuple):
    """Cost of an operator with a strategy, for each microbatch."""

    compute_s: float
    """Forward, backward, and the operator's share of the update."""
    communication_s: float
    """Sums of the gradients of replicated parameters."""
    parameter_bytes: int
    """Memory of the parameters on one device."""


def collective_between(source: str, target: str) -> Collective | None:
    """Return the collective that changes one placement into another; None if no device needs data from another."""
    if source in {target, REPLICATE} or target == PARTIAL:
        return None
    if source == PARTIAL:
        return "AllReduce" if target == REPLICATE else "ReduceScatter"
    return "AllGather" if target == REPLICATE else "AllToAll"


@dataclass(frozen=True)
class CostGraph:
    """Costs of all strategies as plain numbers: the input of the searches.

    The cost of a choice is the sum of ``nodes[i][choice[i]]`` and of ``edges[i, j][choice[i], choice[j]]``.
    """

    nodes: tuple[Costs, ...]
    """Seconds of each strategy of each operator."""
    edges: Mapping[tuple[int, int], Costs]
    """Seconds of redistribution for each pair of strategies, by pairs of operators with i < j."""

    def total(self, choice: Sequence[int]) -> float:
        """Return the seconds of a choice of one strategy for each operator."""
        nodes = sum(float(costs[choice[place]]) for place, costs in enumerate(self.nodes))
        return nodes + sum(float(costs[choice[i], choice[j]]) for (i, j), costs in self.edges.items())

    @cached_property
    def neighbours(self) -> tuple[dict[int, Costs], ...]:
        """Edges of each operator by neighbour; the rows of a matrix are the operator's own strategies."""
        found: tuple[dict[int, Costs], ...] = tuple({} for _ in self.nodes)
        for (i, j), costs in self.edges.items():
            found[i][j] = costs
            found[j][i] = costs.T
        return found


@dataclass(frozen=True)
class LayerCost:
    """Cost model of one layer on a group of devices.

    Args:
        graph: operators, with forks.
        group: devices and their links.
        workload: use of the layer in a step.
        repeated: whether the layer's output enters another layer of the same kind. If not, each device starts with the
            whole input, and ends with the whole output and the whole gradient of the input.
    """

    graph: OperatorGraph
    group: DeviceGroup
    workload: Workload = Workload()
    repeated: bool = False

    def of(self, operator: Operator, strategy: Strategy) -> OperatorCost:
        """Return the cost of an operator with a strategy."""
        group, count = self.group, self.group.devices
        compute_s, communication_s, held = 0.0, 0.0, 0
        if operator.kind not in _VIEWS:
            tensors = list(
                zip((*operator.inputs, operator.output), (*strategy.inputs, strategy.output), strict=True)
            )
            if operator.kind == "embedding":
                tensors[0] = tensors[-1]  # a lookup reads only the rows that it returns
            traffic = sum(self._local_bytes(tensor, layout) for tensor, layout in tensors)
            flops = operator.flops / (count if strategy.is_sharded else 1)
            once_s = max(flops / group.flops_per_s, traffic / group.memory_bytes_per_s) + group.overhead_s
            compute_s = once_s * (1 + _BACKWARD * self.workload.trains)
        for tensor, layout in zip(operator.inputs, strategy.inputs, strict=True):
            spec = self.graph.tensors[tensor]
            if spec.role != "parameter":
                continue
            size = self._local_bytes(tensor, layout)
            held += size
            if self.workload.trains and spec.has_gradient:
                compute_s += _UPDATE_PASSES * size / group.memory_bytes_per_s / self.workload.microbatches
                if layout.gradient == PARTIAL:
                    sum_s = group.collective_s("AllReduce", spec.size_bytes)
                    communication_s += sum_s / self.workload.microbatches
        return OperatorCost(compute_s, communication_s, held)

    def _local_bytes(self, tensor: str, layout: TensorLayout) -> int:
        size = self.graph.tensors[tensor].size_bytes
        return size // self.group.devices if layout.value.startswith("Shard") else size

    def redistribution_s(self, tensor: str, source: TensorLayout, target: TensorLayout) -> float:
        """Return the seconds to move a tensor from its producer's layout to a reader's, and its gradient back."""
        spec = self.graph.tensors[tensor]
        steps = [collective_between(source.value, target.value)]
        if self.workload.trains and spec.has_gradient:
            steps.append(collective_between(target.gradient, source.gradient))
        return sum(self.group.collective_s(step, spec.size_bytes) for step in steps if step is not None)

    @property
    def links(self) -> list[tuple[int, int, int, str]]:
        """Return the edges as (producer, consumer, place among the consumer's inputs, tensor).

        The output of a repeated layer also enters the layer's input, with -1 as its place.
        """
        graph = self.graph
        found = [
            (producer, consumer, index, graph.operators[producer].output)
            for producer, consumer, index in graph.edges
        ]
        last = graph.producer[graph.output]
        entry = next((place for place, each in enumerate(graph.operators) if each.kind == "input"), last)
        if self.repeated and entry != last:
            found.append((last, entry, -1, graph.output))
        return found

    def outside(self, operator: Operator, strategy: Strategy) -> list[tuple[TensorLayout, TensorLayout]]:
        """Return the redistributions of an operator's output at the ends of a layer, as (source, target).

        Only a layer that is not repeated has them: for its input and its output.
        """
        found = list[tuple[TensorLayout, TensorLayout]]()
        if not self.repeated and operator.kind == "input":
            found.append((_WHOLE, strategy.output))
        if not self.repeated and operator.output == self.graph.output:
            found.append((strategy.output, _WHOLE))
        return found

    def _alone_s(self, operator: Operator, strategy: Strategy) -> float:
        ends = (self.redistribution_s(operator.output, *ends) for ends in self.outside(operator, strategy))
        return sum(self.of(operator, strategy)[:2]) + sum(ends)

    def table(self, options: Sequence[StrategyOptions]) -> CostGraph:
        """Return the costs of all strategies and of all pairs of strategies of neighbours."""
        nodes = tuple(
            np.array([self._alone_s(operator, strategy) for strategy in own.strategies])
            for operator, own in zip(self.graph.operators, options, strict=True)
        )
        edges: dict[tuple[int, int], Costs] = {}
        for producer, consumer, index, tensor in self.links:
            sources = [strategy.output for strategy in options[producer].strategies]
            targets = [
                strategy.output if index < 0 else strategy.inputs[index]
                for strategy in options[consumer].strategies
            ]
            costs = np.array(
                [[self.redistribution_s(tensor, source, target) for target in targets] for source in sources]
            )
            key, costs = (
                ((producer, consumer), costs) if producer < consumer else ((consumer, producer), costs.T)
            )
            edges[key] = edges[key] + costs if key in edges else costs
        return CostGraph(nodes, edges)
