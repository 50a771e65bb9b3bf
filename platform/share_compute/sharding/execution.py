"""Execution of a plan of operators: each device computes its parts, and tensors are redistributed between operators.

The exported graph of a layer is interpreted. Each operator runs on local tensors in the layouts of its strategy, as
with ``torch.distributed.tensor.experimental.local_map``. DTensor holds the parameters and redistributes tensors.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.utils._pytree import tree_flatten

from share_compute.models.huggingface.experts import computed_experts
from share_compute.planning.operators.graph import Operator, OperatorGraph
from share_compute.planning.operators.plan import LayerOperators
from share_compute.planning.operators.strategies import (
    PARTIAL,
    REPLICATED,
    Strategy,
    TensorLayout,
    options_of,
)
from share_compute.planning.operators.trace import TracedLayer, traced
from share_compute.sharding.layouts import WHOLE, placement_of, redistribute, text_of
from share_compute.sharding.operations import (
    NotRunnable,
    computed,
    computed_by,
    computed_part,
    reason_to_replicate,
    require_runnable,
)
from share_compute.sharding.specs import distribute_parameters

_OTHER_PLAN = "plan the same layer again, with the same shapes"


class _Placed(NamedTuple):
    """This device's part of a tensor, and the tensor's layout."""

    local: Tensor
    layout: TensorLayout


class _OtherArguments(NamedTuple):
    """Arguments of a call other than the hidden states."""

    options: tuple[str, ...]
    """Names of the keyword arguments, in the order in which the exported graph has them."""
    tensors: list[Tensor]
    fixed: list[Any]
    """Values that are not tensors, with None in the places of tensors, and the structure of all."""

    @classmethod
    def of(cls, arguments: Sequence[Any], options: Mapping[str, Any]) -> _OtherArguments:
        leaves, structure = tree_flatten((tuple(arguments), dict(options)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return cls(
            tuple(options),
            tensors,
            [*(None if isinstance(leaf, Tensor) else leaf for leaf in leaves), structure],
        )


class ShardedLayer(nn.Module):
    """Layer that several devices compute together, according to a plan of its operators.

    Each process of the mesh calls it with the same whole input, and gets the same whole output. Parameters of the layer
    become DTensors in place, with the values of the first process and the placements of the plan. Their gradients are
    summed over the devices in each backward pass.

    Args:
        layer: the layer.
        arguments: positional arguments of a call, of which the first is the hidden states. Later calls must have
            tensors of the same shapes, and equal other arguments.
        options: keyword arguments of a call.
        plan: plan of the layer's operators.
        mesh: devices, as a mesh of one dimension.

    Raises:
        NotRunnable: the plan has other operators, or an operator draws random numbers or changes a tensor in place.
        NotTraceable: operators depend on data.
    """

    def __init__(
        self,
        layer: nn.Module,
        arguments: tuple[Any, ...],
        options: Mapping[str, Any],
        plan: LayerOperators,
        mesh: DeviceMesh,
    ) -> None:
        super().__init__()
        if mesh.ndim != 1:
            raise NotRunnable(
                f"plans of operators are for a mesh of one dimension, and this one has {mesh.ndim}",
                hint="give a mesh whose shape is the number of devices",
            )
        found = traced(_without_data(layer), arguments, options, name=plan.name)
        self.layer = layer
        self.mesh = mesh
        self.replicated: dict[str, str] = {}
        """Reasons why operators are computed as a whole, although the plan cuts them, by name."""
        self._graph = found.graph.forked()
        self._strategies = self._chosen(plan)
        self._run = _program(found, self._graph)
        self._others = _OtherArguments.of(arguments[1:], options)
        self._was_training = layer.training
        self._shapes = [tuple(each.shape) for each in (arguments[0], *self._others.tensors)]
        _place_parameters(layer, self._parameter_layouts(), mesh)

    def alike(self, layer: nn.Module) -> ShardedLayer:
        """Return a sharded layer with the same graph and plan, without tracing.

        Args:
            layer: a layer with equal modules. Its parameters become DTensors, like those of the first layer.
        """
        other = copy.copy(self)
        vars(other)["_modules"] = {"layer": layer}
        _place_parameters(layer, self._parameter_layouts(), self.mesh)
        return other

    @property
    def entry(self) -> TensorLayout:
        """Layout in which the operators read the layer's input."""
        place = next(place for place, each in enumerate(self._graph.operators) if each.kind == "input")
        return self._strategies[place].output

    @property
    def exit(self) -> TensorLayout:
        """Layout in which the operators leave the layer's output."""
        return self._strategies[self._graph.producer[self._graph.output]].output

    def forward(self, hidden: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Return the whole output of a whole input."""
        local = redistribute(hidden, WHOLE, self.entry, self.mesh)
        return redistribute(self.part(local, *arguments, **options), self.exit, WHOLE, self.mesh)

    def part(self, local: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Return this device's part of the output, in the layout ``exit``.

        Args:
            local: this device's part of the input, in the layout ``entry``.
            arguments: the other positional arguments, as a whole.
            options: keyword arguments, as a whole.
        """
        tensors = self._other_tensors(arguments, options)
        self._require_shapes(local, tensors)
        given = [_Placed(local, self.entry), *(_Placed(each, WHOLE) for each in tensors)]
        return self._run(
            given,
            dict(self.layer.named_parameters(remove_duplicate=False)),
            dict(self.layer.named_buffers(remove_duplicate=False)),
            self._output,
        )

    def _other_tensors(self, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors among the other arguments of a call, in the order of the exported graph.

        Raises:
            NotRunnable: the layer was planned for other arguments or for evaluation, or a tensor needs a gradient.
        """
        planned = self._others
        if set(options) != set(planned.options):
            raise NotRunnable(
                f"the layer was planned for the options {', '.join(planned.options) or 'none'}",
                hint="call it with the arguments of the plan",
            )
        others = _OtherArguments.of(arguments, {name: options[name] for name in planned.options})
        if others.fixed != planned.fixed or (self.layer.training and not self._was_training):
            raise NotRunnable(
                "the layer was planned for other arguments, or for evaluation",
                hint="call it with the arguments of the plan, and in its mode",
            )
        if torch.is_grad_enabled() and any(each.requires_grad for each in others.tensors):
            raise NotRunnable(
                "plans have gradients of the hidden states and parameters only, and another tensor needs one",
                hint="detach the other arguments, or run the layer on one device",
            )
        return others.tensors

    def _output(self, place: int, node: fx.Node | None, inputs: Sequence[_Placed]) -> _Placed:
        """Return the output of an operator; the operator is a fork if it has no node."""
        operator, strategy = self._graph.operators[place], self._strategies[place]
        locals_ = [
            redistribute(each.local, each.layout, layout, self.mesh)
            for each, layout in zip(inputs, strategy.inputs, strict=True)
        ]
        if node is None:
            return _Placed(locals_[0], strategy.output)
        if operator.kind == "experts":
            return _Placed(self._part_of_experts(operator, strategy, locals_), strategy.output)
        rank, devices = self.mesh.get_local_rank(), self.mesh.size()
        part = computed_part(node, operator, strategy, locals_, rank=rank, devices=devices)
        return _Placed(part, strategy.output)

    def _part_of_experts(self, operator: Operator, strategy: Strategy, tensors: list[Tensor]) -> Tensor:
        """Return the contribution of this device's experts to the output, or the output of this device's tokens."""
        hidden, index, *others = tensors
        first = 0
        if strategy.output.value == PARTIAL:
            # If another device decided a near tie differently, a token would be lost or counted twice.
            index = index.contiguous()
            distributed.broadcast(index, group=self.mesh.get_group(), group_src=0)
            first = self.mesh.get_local_rank() * others[1].shape[0]
        module = self.layer.get_submodule(operator.module)
        return computed_experts(module, [hidden, index, *others], first)

    def _chosen(self, plan: LayerOperators) -> list[Strategy]:
        """Return the strategy of each operator of the graph."""
        names = [each.name for each in self._graph.operators]
        planned = [each.name for each in plan.operators]
        if names != planned:
            other = sorted(set(names) ^ set(planned))
            raise NotRunnable(
                f"the plan of {plan.name} is of other operators than the layer has: {', '.join(other[:5])}",
                hint=_OTHER_PLAN,
            )
        return [
            self._strategy(operator, choice.strategy)
            for operator, choice in zip(self._graph.operators, plan.operators, strict=True)
        ]

    def _strategy(self, operator: Operator, name: str) -> Strategy:
        options = options_of(operator, self._graph, self.mesh.size())
        by_name = {each.name: each for each in options.strategies}
        if name not in by_name:
            why = options.refused.get(name, "it has no such strategy")
            raise NotRunnable(f"{operator.name} cannot have the strategy {name}: {why}", hint=_OTHER_PLAN)
        reason = reason_to_replicate(operator, by_name[name])
        if reason:
            self.replicated[operator.name] = reason
            return by_name[REPLICATED]
        return by_name[name]

    def _parameter_layouts(self) -> dict[str, str]:
        """Return the placement of each parameter; it is replicated if operators need different placements."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for operator, strategy in zip(self._graph.operators, self._strategies, strict=True):
            for tensor, layout in zip(operator.inputs, strategy.inputs, strict=True):
                if self._graph.tensors[tensor].role == "parameter":
                    found[tensor].add(layout.value)
        return {name: next(iter(own)) if len(own) == 1 else WHOLE.value for name, own in found.items()}

    def _require_shapes(self, local: Tensor, others: Sequence[Tensor]) -> None:
        entry = list(local.shape)
        placement = placement_of(self.entry.value)
        if isinstance(placement, Shard):
            entry[placement.dim] *= self.mesh.size()
        shapes = [tuple(entry), *(tuple(each.shape) for each in others)]
        if shapes != self._shapes:
            raise NotRunnable(
                f"the layer was planned for tensors of the shapes {self._shapes}, not {shapes}",
                hint="call it with the shapes of the plan",
            )


def require_runnable_layer(found: TracedLayer) -> None:
    """Raise NotRunnable if an operator of a layer draws random numbers, or changes a tensor in place."""
    _program(found, found.graph.forked())


def _program(found: TracedLayer, graph: OperatorGraph) -> _Program:
    program = _Program(found, graph)
    for place, node in program.nodes_of.items():
        require_runnable(graph.operators[place], computed_by(node))
    return program


class ShardedLayers(nn.Module):
    """Layers with the same arguments, one after the other, whose hidden states stay sharded between them."""

    def __init__(self, layers: Sequence[ShardedLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Return the whole output of a whole input."""
        layout = WHOLE
        for layer in self.layers:
            assert isinstance(layer, ShardedLayer)
            hidden = layer.part(redistribute(hidden, layout, layer.entry, layer.mesh), *arguments, **options)
            layout, mesh = layer.exit, layer.mesh
        return redistribute(hidden, layout, WHOLE, mesh)


class _Program:
    """Exported program of a layer; a function of the caller computes its operators."""

    def __init__(self, found: TracedLayer, graph: OperatorGraph) -> None:
        self._graph = graph
        self._tensors = found.tensors
        self._nodes: list[fx.Node] = list(found.program.graph.nodes)
        signature = found.program.graph_signature
        self._inputs = list(signature.user_inputs)
        self._buffers = {
            name: own.removeprefix("layer.") for name, own in signature.inputs_to_buffers.items()
        }
        if signature.inputs_to_lifted_tensor_constants:
            raise NotRunnable(
                f"{graph.name} reads tensors that are neither parameters nor buffers",
                hint="register them as buffers",
            )
        outputs = {operator.output: place for place, operator in enumerate(graph.operators)}
        self.nodes_of = {
            outputs[node.name]: node
            for node in self._nodes
            if node.op == "call_function" and node.name in outputs
        }
        """Node of each operator, by its place; input and forks have none."""
        for node in self._nodes:
            if node.name in self._tensors and str(node.target) == "aten.detach.default":
                raise NotRunnable(
                    f"{found.graph.name} detaches a tensor, which plans do not consider",
                    hint="run it on one device",
                )
            is_computed_by_each = node.name not in outputs and self._tensors.get(node.name) == node.name
            if is_computed_by_each and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                raise NotRunnable(
                    f"{found.graph.name} draws random numbers, which would differ from device to device",
                    hint="set its dropout rates to 0, or run it on one device",
                )
        self._places = {node.name: place for place, node in self.nodes_of.items()}
        self._forks = {
            operator.inputs[0]: place
            for place, operator in enumerate(graph.operators)
            if operator.kind == "fork"
        }

    def __call__(
        self,
        given: Sequence[_Placed],
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        output: Callable[[int, fx.Node | None, Sequence[_Placed]], _Placed],
    ) -> Tensor:
        """Return this device's part of the layer's output.

        Args:
            given: tensors among the arguments of a call.
            parameters: parameters of the layer, by name.
            buffers: buffers of the layer, by name.
            output: function from the index of an operator and its inputs to the operator's output.
        """
        known = self._known(given, parameters, buffers)
        device = given[0].local.device
        for node in self._nodes:
            if node.op != "call_function" or node.name not in self._tensors:
                continue
            tensor = self._tensors[node.name]
            if node.name in self._places:
                place = self._places[node.name]
                inputs = [known[each] for each in self._graph.operators[place].inputs]
                known[tensor] = output(place, node, inputs)
                if tensor in self._forks:
                    fork = self._forks[tensor]
                    known[self._graph.operators[fork].output] = output(fork, None, [known[tensor]])
            elif tensor == node.name:  # other nodes are aliases
                source = computed_by(node)
                leaves = tree_flatten((source.args, source.kwargs))[0]
                names = [self._tensors[leaf.name] for leaf in leaves if isinstance(leaf, fx.Node)]
                known[tensor] = _Placed(computed(node, [known[each].local for each in names], device), WHOLE)
        return known[self._graph.output].local

    def _known(
        self, given: Sequence[_Placed], parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> dict[str, _Placed]:
        """Return the tensors that exist before the first operator, by name."""
        known = {name: _Placed(buffers[own], WHOLE) for name, own in self._buffers.items()}
        known |= dict(zip(self._inputs, given, strict=True))
        for name, parameter in parameters.items():
            assert isinstance(parameter, DTensor)
            stored = text_of(parameter.placements[0])
            local = parameter.to_local(grad_placements=parameter.placements)
            known[name] = _Placed(local, TensorLayout(stored, stored))
        return known


def _without_data(layer: nn.Module) -> nn.Module:
    """Return a copy of a layer on the meta device; the layer's own tensors are not copied."""
    memo: dict[int, Any] = {id(each): each.detach().to("meta") for each in layer.buffers()}
    for parameter in layer.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    return copy.deepcopy(layer, memo)


def _place_parameters(layer: nn.Module, layouts: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Replace the parameters of a layer by DTensors; those without a layout are replicated."""

    def placements(names: Sequence[str], _: nn.Parameter) -> Sequence[Placement]:
        wanted = {layouts[name] for name in names if name in layouts}
        return [placement_of(wanted.pop() if len(wanted) == 1 else WHOLE.value)]

    distribute_parameters(layer, mesh, placements)
