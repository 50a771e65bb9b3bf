"""Plans of operators: a strategy for each operator of a layer, in the terms of `torch.distributed.tensor`.

`OperatorChoice.parameters` has the placements for ``distribute_tensor``. `Redistribution` has the calls of
``DTensor.redistribute``, in the order in which the layer makes them.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import combinations
from typing import NamedTuple

from share_compute.errors import PlanInfeasible, UserError
from share_compute.files.strict import StrictModel
from share_compute.planning.operators.cost import (
    Collective,
    CostGraph,
    DeviceGroup,
    LayerCost,
    Workload,
    collective_between,
)
from share_compute.planning.operators.graph import Operator, OperatorGraph
from share_compute.planning.operators.search import (
    dynamic_programming,
    recursive_programming,
    sharding_propagation,
)
from share_compute.planning.operators.strategies import Strategy, StrategyOptions, TensorLayout, options_of
from share_compute.specification.placement.operators import SearchName
from share_compute.topology import BASE_DTYPE, Contributor, Link, Topology

ASSUMED_LINK_BYTES_PER_S = 2e9
"""Assumed bandwidth between devices of one machine without measured links: that of gloo through the loopback device."""
ASSUMED_LINK_LATENCY_S = 5e-5
"""Assumed latency between devices of one machine without measured links."""
_ONE_MICROBATCH = Workload()
_SOURCES = {"input", "fork"}
"""Kinds of operators that users do not know."""


class StrategyRefused(UserError):
    """Error: a strategy that the user gave is not legal."""

    code = "strategy-refused"


class OperatorChoice(StrictModel):
    """Operator with its strategy."""

    name: str
    """Module and operation within the layer: ``mlp.down_proj``."""
    kind: str
    target: str
    """Name of the operation in torch; empty for the input of the layer and for forks."""
    module: str
    strategy: str
    fixed: bool
    """Whether the user gave the strategy."""
    reads: tuple[str, ...]
    """Operators that compute its inputs, without parameters and constants."""
    inputs: tuple[str, ...]
    """Placement that the operator needs of each input, in the order of its arguments."""
    output: str
    """Placement of its output."""
    parameters: dict[str, str]
    """Placement of each parameter, by its name in the layer."""
    compute_s: float
    communication_s: float
    """Seconds of the AllReduce of parameters' gradients."""
    parameter_bytes: int
    """Memory of its parameters on each device."""
    alternatives: tuple[str, ...]
    """Names of its legal strategies."""
    refused: dict[str, str]
    """Reason for each strategy that is not legal."""


class Redistribution(StrictModel):
    """Change of the placement of a tensor between two operators, and of its gradient on the way back."""

    tensor: str
    producer: str
    """Operator that computes the tensor; empty for the input of a layer that is not repeated."""
    consumer: str
    """Operator that reads the tensor; ``input`` for the output of the layer, which is what follows it."""
    source: str
    target: str
    collective: Collective | None
    """Collective of the forward pass; None if each device has what it needs."""
    gradient_source: str
    gradient_target: str
    gradient_collective: Collective | None
    size_bytes: int
    """Size of the whole tensor."""
    seconds: float


class LayerOperators(StrictModel):
    """Plan of the operators of one kind of layer. Times are in seconds for one microbatch, forward and backward."""

    name: str
    layers: tuple[int, ...]
    """Indices of the layers that have this plan."""
    operators: tuple[OperatorChoice, ...]
    redistributions: tuple[Redistribution, ...]
    """In the order of the forward pass."""
    seconds: float
    compute_s: float
    communication_s: float
    """Redistributions and sums of gradients."""
    one_device_s: float
    """Seconds of the layer on one device."""
    parameter_bytes: int
    """Memory of the parameters on each device."""
    one_device_parameter_bytes: int


class OperatorReport(StrictModel):
    """Plans of the operators of all kinds of layers of a model."""

    model: str
    machine: str
    """Name of the machine whose devices are used."""
    devices: int
    search: SearchName
    fully_use_devices: bool
    samples: int
    """Samples of a microbatch."""
    microbatches: int
    link_bytes_per_s: float
    link_latency_s: float
    link_assumed: bool
    """Whether the link between the devices was not measured."""
    layers: tuple[LayerOperators, ...]


def plan_layer(
    graph: OperatorGraph,
    group: DeviceGroup,
    *,
    layers: Sequence[int] = (0,),
    workload: Workload = _ONE_MICROBATCH,
    search: SearchName = "dynamic_programming",
    fixed: Mapping[str, str] | None = None,
    fully_use_devices: bool = False,
) -> LayerOperators:
    """Return the plan of one kind of layer.

    Args:
        graph: operators of the layer.
        group: devices and their links.
        layers: indices of the layers of this kind. If there are several, the output of one is the input of another.
        workload: use of the layer in a step.
        search: name of the search.
        fixed: strategies by pattern of operators' names, such as ``{"mlp.down_proj": "row"}``. A pattern that matches
            no operator of this layer is ignored; see `require_matches`.
        fully_use_devices: whether every operator that can be cut is cut, so that no device computes it as a whole.

    Raises:
        StrategyRefused: a given strategy is not legal.
        TooEntangled: the graph is too entangled for dynamic programming.
    """
    forked = graph.forked()
    options = [options_of(operator, forked, group.devices) for operator in forked.operators]
    given = _given(forked, options, fixed or {})
    allowed = [
        _allowed(operator, own, given.get(place), fully_use_devices)
        for place, (operator, own) in enumerate(zip(forked.operators, options, strict=True))
    ]
    cost = LayerCost(forked, group, workload, repeated=graph.repeats and len(layers) > 1)
    found = _search(search, cost, allowed, dict.fromkeys(given, 0))
    chosen = [own.strategies[index] for own, index in zip(allowed, found, strict=True)]
    return _described(cost, options, chosen, set(given), layers)


def _search(
    search: SearchName, cost: LayerCost, options: Sequence[StrategyOptions], given: Mapping[int, int]
) -> list[int]:
    match search:
        case "dynamic_programming":
            return dynamic_programming(cost.table(options))
        case "sharding_propagation":
            return sharding_propagation(cost.table(options), given)
        case "recursive_programming":
            return recursive_programming(list(_levels(cost, options)))


def _levels(cost: LayerCost, options: Sequence[StrategyOptions]) -> Iterator[CostGraph]:
    """Yield the costs on growing numbers of devices, each a multiple of the one before: 2, 4 and 8 for 8 devices."""
    count, left = 1, cost.group.devices
    while left > 1:
        factor = next(each for each in range(2, left + 1) if left % each == 0)
        count, left = count * factor, left // factor
        yield replace(cost, group=replace(cost.group, devices=count)).table(options)
    if count == 1:
        yield cost.table(options)


def _allowed(
    operator: Operator, options: StrategyOptions, given: str | None, fully_use_devices: bool
) -> StrategyOptions:
    strategies = options.strategies
    if given is not None:
        strategies = tuple(each for each in strategies if each.name == given)
    elif fully_use_devices and operator.kind not in _SOURCES and any(each.is_sharded for each in strategies):
        strategies = tuple(each for each in strategies if each.is_sharded)
    return replace(options, strategies=strategies)


def _given(
    graph: OperatorGraph, options: Sequence[StrategyOptions], fixed: Mapping[str, str]
) -> dict[int, str]:
    """Return the given strategies by the index of their operator.

    Raises:
        StrategyRefused: a strategy is not legal, or two patterns give different strategies to one operator.
    """
    given: dict[int, tuple[str, str]] = {}
    for pattern, strategy in fixed.items():
        for place, operator in enumerate(graph.operators):
            if not _matches(operator, pattern):
                continue
            _require_legal(operator, options[place], strategy)
            other, before = given.setdefault(place, (pattern, strategy))
            if before != strategy:
                raise StrategyRefused(
                    f"{operator.name} is given two strategies: {before} by {other!r}, and {strategy} by {pattern!r}",
                    hint="leave one of them out",
                )
    return {place: strategy for place, (_, strategy) in given.items()}


def _matches(operator: Operator, pattern: str) -> bool:
    return operator.kind not in _SOURCES and fnmatchcase(operator.name, pattern)


def _require_legal(operator: Operator, options: StrategyOptions, strategy: str) -> None:
    if strategy in options.names:
        return
    why = options.refused.get(strategy, f"{operator.name} ({operator.kind}) has no such strategy")
    raise StrategyRefused(
        f"{operator.name} cannot have the strategy {strategy}: {why}",
        hint=f"give one of: {', '.join(options.names)}",
    )


def require_legal(graphs: Sequence[OperatorGraph], devices: int, given: Mapping[str, str]) -> None:
    """Raise StrategyRefused if a pattern matches no operator of any layer, or a strategy is not legal."""
    require_matches(graphs, given)
    for graph in graphs:
        _given(graph, [options_of(operator, graph, devices) for operator in graph.operators], given)


@contextmanager
def naming_field() -> Iterator[None]:
    """Name the field of a job file in errors about given strategies."""
    try:
        yield
    except StrategyRefused as error:
        raise StrategyRefused(
            f"parallelism.operators.strategies: {error.message}", hint=error.hint
        ) from error


def require_matches(graphs: Sequence[OperatorGraph], fixed: Mapping[str, str]) -> None:
    """Raise StrategyRefused if a pattern matches no operator of any layer."""
    operators = [
        operator for graph in graphs for operator in graph.operators if operator.kind not in _SOURCES
    ]
    for pattern in fixed:
        if not any(_matches(operator, pattern) for operator in operators):
            names = sorted({operator.name for operator in operators})
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
            raise StrategyRefused(
                f"no operator matches {pattern!r}",
                hint=f"names of operators are, for example: {', '.join(near)}",
            )


def _described(
    cost: LayerCost,
    options: Sequence[StrategyOptions],
    chosen: Sequence[Strategy],
    given: set[int],
    layers: Sequence[int],
) -> LayerOperators:
    operators = tuple(
        _choice(cost, operator, own, strategy, fixed=place in given)
        for place, (operator, own, strategy) in enumerate(
            zip(cost.graph.operators, options, chosen, strict=True)
        )
    )
    redistributions = tuple(_redistributions(cost, chosen))
    compute_s = sum(each.compute_s for each in operators)
    communication_s = sum(each.communication_s for each in operators)
    communication_s += sum(each.seconds for each in redistributions)
    alone = replace(cost, group=replace(cost.group, devices=1))
    whole = [
        alone.of(each, own.strategies[-1]) for each, own in zip(cost.graph.operators, options, strict=True)
    ]
    return LayerOperators(
        name=cost.graph.name,
        layers=tuple(layers),
        operators=operators,
        redistributions=redistributions,
        seconds=compute_s + communication_s,
        compute_s=compute_s,
        communication_s=communication_s,
        one_device_s=sum(each.compute_s for each in whole),
        parameter_bytes=sum(each.parameter_bytes for each in operators),
        one_device_parameter_bytes=sum(each.parameter_bytes for each in whole),
    )


def _choice(
    cost: LayerCost, operator: Operator, options: StrategyOptions, strategy: Strategy, *, fixed: bool
) -> OperatorChoice:
    figures = cost.of(operator, strategy)
    return OperatorChoice(
        name=operator.name,
        kind=operator.kind,
        target=operator.target,
        module=operator.module,
        strategy=strategy.name,
        fixed=fixed,
        reads=tuple(
            cost.graph.operators[cost.graph.producer[tensor]].name
            for tensor in operator.inputs
            if tensor in cost.graph.producer
        ),
        inputs=tuple(layout.value for layout in strategy.inputs),
        output=strategy.output.value,
        parameters={
            tensor: layout.value
            for tensor, layout in zip(operator.inputs, strategy.inputs, strict=True)
            if cost.graph.tensors[tensor].role == "parameter"
        },
        alternatives=options.names,
        refused=dict(options.refused),
        **figures._asdict(),
    )


class _Change(NamedTuple):
    """Layouts of a tensor before and after a redistribution; an index of None means outside of the layer."""

    tensor: str
    producer: int | None
    consumer: int | None
    source: TensorLayout
    target: TensorLayout


def _redistributions(cost: LayerCost, chosen: Sequence[Strategy]) -> Iterator[Redistribution]:
    graph = cost.graph
    names = [each.name for each in graph.operators]
    ends = list(_outside(cost, chosen))
    changes = [each for each in ends if each.producer is None]
    changes += [*_between(cost, chosen), *(each for each in ends if each.producer is not None)]
    for tensor, producer, consumer, source, target in changes:
        differs = (
            source.gradient != target.gradient and cost.workload.trains and graph.tensors[tensor].has_gradient
        )
        if source.value == target.value and not differs:
            continue
        yield Redistribution(
            tensor=tensor,
            producer="" if producer is None else names[producer],
            consumer="input" if consumer is None else names[consumer],
            source=source.value,
            target=target.value,
            collective=collective_between(source.value, target.value),
            gradient_source=target.gradient,
            gradient_target=source.gradient,
            gradient_collective=collective_between(target.gradient, source.gradient) if differs else None,
            size_bytes=graph.tensors[tensor].size_bytes,
            seconds=cost.redistribution_s(tensor, source, target),
        )


def _between(cost: LayerCost, chosen: Sequence[Strategy]) -> Iterator[_Change]:
    for producer, consumer, index, tensor in cost.links:
        target = chosen[consumer].output if index < 0 else chosen[consumer].inputs[index]
        yield _Change(tensor, producer, consumer, chosen[producer].output, target)


def _outside(cost: LayerCost, chosen: Sequence[Strategy]) -> Iterator[_Change]:
    for place, (operator, strategy) in enumerate(zip(cost.graph.operators, chosen, strict=True)):
        for source, target in cost.outside(operator, strategy):
            is_entry = target is strategy.output
            yield _Change(
                operator.output, None if is_entry else place, place if is_entry else None, source, target
            )


def group_on(topology: Topology, devices: int, dtype: str = BASE_DTYPE) -> tuple[str, DeviceGroup, bool]:
    """Return the machine with the fastest ``devices`` equal devices, its devices, and whether their link is assumed.

    Contributors of one host and kind are the devices of a machine, and so are devices that are lent together. A CPU
    alone is divided into as many logical devices as it has threads: each has an equal part of its speed.

    Raises:
        UserError: ``devices`` is less than 1.
        PlanInfeasible: no machine has this many devices with a measured speed.
    """
    if devices < 1:
        raise UserError(
            f"a plan of operators needs at least 1 device, not {devices}", hint="give a larger number"
        )
    topology = _devices_apart(topology)
    machines: dict[tuple[str, str], list[Contributor]] = defaultdict(list)
    for each in topology.contributors:
        if each.devices and _speed(each, dtype) > 0 and each.memory_bytes_per_s > 0:
            machines[each.host or each.id, each.device.kind].append(each)
    sizes = {
        key: max(len(own), own[0].cpu_threads if key[1] == "cpu" else 0) for key, own in machines.items()
    }
    found = [
        _group(topology, own, devices, dtype)
        for key, own in sorted(machines.items())
        if sizes[key] >= devices
    ]
    if not found:
        key = max(sizes, key=lambda each: sizes[each], default=None)
        most = f"{machines[key][0].name} has the most: {sizes[key]}" if key else "none has a measured speed"
        raise PlanInfeasible(
            f"no machine has {devices} devices: {most}",
            hint="plan with fewer devices, or let another machine join",
        )
    return max(found, key=lambda each: each[1].flops_per_s)


def _devices_apart(topology: Topology) -> Topology:
    """Return the topology with a separate contributor, and links, for each of the devices that are lent together."""
    contributors, links = [], list(topology.links)
    for machine in topology.contributors:
        devices = machine.group
        if len(devices) < 2:
            contributors.append(machine)
            continue
        threads, host = max(1, machine.cpu_threads // len(devices)), machine.host or machine.id
        parts = [
            replace(machine, id=f"{machine.id}:{place}", devices=(device,), cpu_threads=threads, host=host)
            for place, device in enumerate(devices)
        ]
        contributors += parts
        links += [
            Link(one.id, other.id, one.device.peer_latency_s, one.device.peer_bytes_per_s)
            for one, other in combinations(parts, 2)
            if one.device.peer_bytes_per_s > 0
        ]
    return Topology(tuple(contributors), tuple(links))


def _speed(machine: Contributor, dtype: str) -> float:
    return machine.flops_per_s(dtype) or machine.flops_per_s()


def _cores_share(machines: Sequence[Contributor]) -> float:
    """Return the fraction of their measured speed that contributors on one computer reach when all of them compute.

    CPUs with more threads together than the computer has share its cores, as in planning/cost/tables.py.
    """
    threads = max(each.host_threads for each in machines)
    wanted = sum(each.cpu_threads for each in machines)
    is_crowded = machines[0].device.kind == "cpu" and machines[0].host and 0 < threads < wanted
    return threads / wanted if is_crowded else 1.0


def _group(
    topology: Topology, machines: Sequence[Contributor], devices: int, dtype: str
) -> tuple[str, DeviceGroup, bool]:
    own = sorted(machines, key=lambda each: (-_speed(each, dtype), each.id))[:devices]
    divided = 1 if len(own) == devices else devices
    used = own if divided == 1 else own[:1]
    ids = {each.id for each in used}
    cores = _cores_share(used)
    links = [link for link in topology.links if {link.source, link.target} <= ids and not link.is_dead]
    group = DeviceGroup(
        devices=devices,
        flops_per_s=min(_speed(each, dtype) for each in used) / divided * cores,
        memory_bytes_per_s=min(each.memory_bytes_per_s for each in used) / divided * cores,
        link_bytes_per_s=min((link.bytes_per_s for link in links), default=ASSUMED_LINK_BYTES_PER_S),
        link_latency_s=max((link.latency_s for link in links), default=ASSUMED_LINK_LATENCY_S),
        overhead_s=max(each.overhead_s for each in used),
    )
    return used[0].name, group, devices > 1 and not links
