"""Traces the layers of a model into operator graphs, with `torch.export` on the meta device: no weights, no data.

torch.export keeps operations such as ``aten.linear`` and ``aten.scaled_dot_product_attention`` whole, and knows the
module of each operation. make_fx would split attention into its parts, and torch.fx's symbolic tracer cannot trace the
models of transformers 5. This module imports torch.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from share_compute.errors import UserError
from share_compute.models.blueprint import Blueprint
from share_compute.models.huggingface.experts import experts_as_operations
from share_compute.models.profiles.profiling import UNCOUNTABLE
from share_compute.planning.operators.calls import Dims, TracedCall
from share_compute.planning.operators.graph import (
    FEATURES,
    Operator,
    OperatorGraph,
    TensorSpec,
    input_operator,
)
from share_compute.planning.operators.plan import naming_field, require_legal
from share_compute.planning.operators.rules import describe, is_counted
from share_compute.specification import TrainJob

if TYPE_CHECKING:  # transformers is slow to import
    from share_compute.models.huggingface.layer_calls import LayerCall

_SKIPPED = {"_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range_for_size"}
_ALIASES = {"detach", "alias", "lift_fresh_copy"}
_UNKNOWN_HINT = (
    "choose a model whose layers compute with linear layers, matmul, einsum, attention or convolutions"
)
_INPUT_NAMES = {1: ("batch",), 2: ("batch", FEATURES), 3: ("batch", "sequence", FEATURES)}


class NotTraceable(UserError):
    """Error: the operators of a layer depend on its data, or its code cannot run without data."""

    code = "operators-not-traceable"


def layer_graphs(
    blueprint: Blueprint, batch: int, length: int
) -> list[tuple[OperatorGraph, tuple[int, ...]]]:
    """Return the operator graph of each kind of layer of a model, with the indices of its layers.

    Embedding and head of a Hugging Face model are left out. Declared layers are one graph, because neighbours differ.

    Args:
        blueprint: the model.
        batch: samples in a microbatch.
        length: tokens of a sample; other samples have the shape of the blueprint.

    Raises:
        NotTraceable: operators depend on data.
        UserError: the model is invalid, or its layers cannot be traced.
    """
    if blueprint.config is None:
        from share_compute.models.layers import whole_model  # noqa: PLC0415 - only one of the kinds is needed

        module, samples = whole_model(blueprint, batch)
        graph = trace(module, (samples,), {}, name="declared layers")
        entry = graph.tensors[graph.operators[0].output]
        # The first layer reads samples, whose gradient is not computed.
        tensors = {**graph.tensors, entry.name: replace(entry, has_gradient=False)}
        graph = replace(graph, tensors=tensors, repeats=False)
        return [(graph, tuple(range(blueprint.num_declared)))]
    return list(_transformer_graphs(blueprint, batch, length))


def require_strategies(blueprint: Blueprint, spec: TrainJob) -> None:
    """Raise StrategyRefused if a strategy of ``parallelism.operators`` is not legal, or matches no operator.

    Without a number of microbatches, `DividedStage` checks their size.
    """
    given, training = spec.parallelism.operators.strategies, spec.training
    graphs = layer_graphs(
        blueprint, training.batch_size // (training.microbatches or 1), training.sequence_length
    )
    with naming_field():
        require_legal([graph for graph, _ in graphs], spec.parallelism.tensor, given)


def _transformer_graphs(
    blueprint: Blueprint, batch: int, length: int
) -> Iterator[tuple[OperatorGraph, tuple[int, ...]]]:
    for layer, (arguments, options), places in layer_calls(blueprint, batch, length):
        yield trace(layer, arguments, options, name=type(layer).__name__), places


def layer_calls(
    blueprint: Blueprint, batch: int, length: int
) -> Iterator[tuple[nn.Module, LayerCall, tuple[int, ...]]]:
    """Yield (layer, its call, indices of layers like it) for each kind of layer of a Hugging Face model.

    The layers are in training mode. The arguments are those of `layer_graphs`. Large parameters are on the meta device.

    Raises:
        NotTraceable: the code around the layers cannot run without data.
        UserError: the model is invalid, or of a kind whose layers are not traced.
    """
    from share_compute.models.huggingface.decoder import trained_sketch  # noqa: PLC0415 - slow to import
    from share_compute.models.huggingface.image_classifier import hidden_shape_of  # noqa: PLC0415
    from share_compute.models.huggingface.layer_calls import (  # noqa: PLC0415
        first_alike,
        pass_through,
        recorded_calls,
    )

    if blueprint.uses_encoder:
        raise UserError(
            "the operators of text encoders are not planned",
            hint="choose a causal language model, a classifier of images, or declared layers",
        )
    model, outline = trained_sketch(blueprint)
    text = model.train().config.get_text_config()
    stack, rows = getattr(outline.base, outline.layers), batch * blueprint.objective.rows
    layers = list(stack)
    firsts = first_alike(layers, getattr(text, "layer_types", None))
    if blueprint.classifies_images:
        hidden = torch.zeros(rows, *hidden_shape_of(blueprint.config or {}, blueprint.sample_shape))
        calls: dict[int, LayerCall] = {first: ((hidden,), {}) for first in firsts}
    else:
        hidden = torch.zeros(rows, length, int(text.hidden_size))
        # Without this, the modules after the layers would compute on real tensors, too.
        pass_through(outline.base, stack, (*outline.opening, *outline.closing))
        with _traceable(type(model).__name__):
            calls = recorded_calls(outline.base, stack, set(firsts), hidden, cached=False)
    for first in sorted(set(firsts)):
        places = tuple(index for index, kind in enumerate(firsts) if kind == first)
        yield layers[first], calls[first], places


class TracedLayer(NamedTuple):
    """Call to a layer as a graph of torch, and as an operator graph."""

    program: ExportedProgram
    graph: OperatorGraph
    tensors: Mapping[str, str]
    """Name of the tensor in the operator graph, by node of the program. Aliases have the name of their source."""


class _Call(nn.Module):
    """A call to a layer whose tensors are arguments, and whose other arguments are fixed."""

    def __init__(self, layer: nn.Module, arguments: Any) -> None:
        super().__init__()
        self.layer = layer
        leaves, self._structure = tree_flatten(arguments)
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def forward(self, *tensors: Tensor) -> Tensor:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        arguments, options = tree_unflatten(leaves, self._structure)
        found = self.layer(*arguments, **options)
        output: Tensor = found[0] if isinstance(found, tuple) else found
        return output


def trace(
    layer: nn.Module, arguments: tuple[Any, ...], options: Mapping[str, Any], *, name: str
) -> OperatorGraph:
    """Return the operator graph of a call to a layer.

    Args:
        layer: the layer; its parameters are moved to the meta device.
        arguments: positional arguments; the first is the tensor from the previous layer.
        options: keyword arguments.
        name: name of the graph.

    Raises:
        NotTraceable: control flow depends on data, or the code cannot run without data.
    """
    return traced(layer, arguments, options, name=name).graph


def traced(
    layer: nn.Module, arguments: tuple[Any, ...], options: Mapping[str, Any], *, name: str
) -> TracedLayer:
    """Return the exported program of a call to a layer, besides the operator graph."""
    call = _Call(layer.to("meta"), (arguments, dict(options)))
    leaves = [leaf for leaf in tree_flatten((arguments, dict(options)))[0] if isinstance(leaf, Tensor)]
    with _traceable(name), experts_as_operations(call):
        program = torch.export.export(call, tuple(leaf.to("meta") for leaf in leaves), strict=False)
        _replace_changes_in_place(program.graph)
        reader = _Reader(program, call)
        graph = reader.graph(name)
    return TracedLayer(program, graph, reader.tensors)


def _replace_changes_in_place(graph: fx.Graph) -> None:
    """Replace in-place operations such as ``div_`` by copying ones, where no later reader needs the changed tensor."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        changed = node.args[0] if node.args else None
        functional = _functional(node.target)
        if functional is None or not isinstance(changed, fx.Node) or not _is_fresh(changed):
            continue
        others = [user for user in changed.users if user is not node]
        if all(order[user] < order[node] and _is_new(user) for user in others):
            node.target = functional


def _functional(target: Any) -> Any:
    """Return the out-of-place variant of an operation that writes to its first argument; None if there is none."""
    if not isinstance(target, OpOverload) or not target._schema.is_mutable:  # noqa: SLF001 - no public name
        return None
    name = target._opname  # noqa: SLF001
    packet = getattr(getattr(torch.ops, target.namespace), name.removesuffix("_"), None)
    return getattr(packet, target._overloadname, None) if name.endswith("_") else None  # noqa: SLF001


def _is_fresh(node: fx.Node) -> bool:
    """Return whether a node's tensor is neither an input nor a view of another tensor."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, fx.Node) and _is_new(source)


def _is_new(node: fx.Node) -> bool:
    """Return whether the outputs of an operation share no memory with its inputs."""
    returns = node.target._schema.returns if isinstance(node.target, OpOverload) else ()  # noqa: SLF001
    return bool(returns) and all(each.alias_info is None for each in returns)


@contextmanager
def _traceable(name: str) -> Iterator[None]:
    """Raise NotTraceable if code cannot run without data."""
    try:
        yield
    except UNCOUNTABLE as failure:
        lines = str(failure).strip().splitlines() or [type(failure).__name__]
        raise NotTraceable(
            f"{name} has no fixed graph of operators: {lines[0][:200]}",
            hint="operators are planned only for layers whose control flow does not depend on values of tensors",
        ) from failure


class _Reader:
    """Reads an exported program into an `OperatorGraph`."""

    def __init__(self, program: ExportedProgram, call: _Call) -> None:
        self._program = program
        self._parameters = dict(call.named_parameters())
        self._alias: dict[fx.Node, str] = {}
        """Name of the tensor of each node."""
        self._dims: dict[str, Dims] = {}
        self._tensors: dict[str, TensorSpec] = {}
        self._operators: list[Operator] = []

    def graph(self, name: str) -> OperatorGraph:
        """Return the graph."""
        self._read_inputs()
        output = ""
        for node in self._program.graph.nodes:
            if node.op == "get_attr" or isinstance(node.target, HigherOrderOperator):
                raise NotTraceable(
                    f"{name} has no fixed graph of operators: it has the inner graph {node.name}",
                    hint="operators are planned only for layers without torch.cond and loops over tensors",
                )
            if node.op == "call_function":
                self._read_call(node)
            elif node.op == "output":
                output = self._alias[tree_flatten(node.args)[0][0]]
        operators = tuple(_named(self._operators))
        used = {tensor for each in operators for tensor in (*each.inputs, each.output)}
        tensors = {tensor: spec for tensor, spec in self._tensors.items() if tensor in used}
        return OperatorGraph(name, operators, tensors, output)

    @property
    def tensors(self) -> dict[str, str]:
        """Return, for each node that was read, the name of its tensor."""
        return {node.name: tensor for node, tensor in self._alias.items()}

    def _read_inputs(self) -> None:
        signature = self._program.graph_signature
        parameters = signature.inputs_to_parameters
        entry = signature.user_inputs[0]
        for node in self._program.graph.nodes:
            if node.op != "placeholder":
                continue
            self._alias[node] = tensor = parameters.get(node.name, node.name).removeprefix("layer.")
            value = node.meta["val"]
            names = tuple(f"dim{place}" for place in range(value.dim()))
            if node.name in parameters:
                trained = self._parameters[parameters[node.name]].requires_grad
                self._add(tensor, value, names, role="parameter", has_gradient=trained)
            elif node.name != entry:
                self._add(tensor, value, names, role="constant", has_gradient=False)
            else:
                names = _input_names(value)
                self._add(tensor, value, names, has_gradient=value.is_floating_point())
                self._operators.append(input_operator(self._tensors[tensor], names))

    def _add(self, tensor: str, value: Any, names: tuple[str, ...], **options: Any) -> None:
        shape = tuple(int(size) for size in value.shape)
        self._dims[tensor] = Dims(shape, names)
        self._tensors[tensor] = TensorSpec(tensor, shape, value.dtype.itemsize, **options)

    def _read_call(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        source = node.args[0] if node.target is operator.getitem else node
        assert isinstance(source, fx.Node)
        operation = _operation(source)
        if operation in _SKIPPED or not isinstance(value, Tensor):
            return  # reads of a tuple are handled at the nodes that take its items
        inputs = [each for each in tree_flatten((source.args, source.kwargs))[0] if isinstance(each, fx.Node)]
        if _is_alias(operation, source, value):
            self._alias[node] = self._alias[inputs[0]]
            return
        names = tuple(self._alias[each] for each in inputs)
        self._alias[node] = tensor = node.name
        if all(self._tensors[each].role == "constant" for each in names):
            dims = tuple(f"dim{place}" for place in range(value.dim()))
            self._add(tensor, value, dims, role="constant", has_gradient=False)
            return
        call = self._traced(source, operation, tuple(int(size) for size in value.shape))
        rule = describe(call)
        if not is_counted(call, rule) or (rule.kind == "other" and not _is_of_torch(source)):
            raise NotTraceable(
                f"the floating-point operations of {source.target} are not known", hint=_UNKNOWN_HINT
            )
        self._add(tensor, value, tuple(rule.names), has_gradient=value.is_floating_point())
        path = next(reversed((source.meta.get("nn_module_stack") or {"": ("", "")}).values()))[0]
        self._operators.append(
            Operator(
                name=operation,
                kind=rule.kind,
                inputs=names,
                output=tensor,
                equation=rule.equation,
                axes=rule.axes,
                flops=rule.flops,
                target=str(source.target),
                module=path.removeprefix("layer").removeprefix("."),
            )
        )

    def _traced(self, node: fx.Node, operation: str, shape: tuple[int, ...]) -> TracedCall:
        def dims(value: Any) -> Any:
            return self._dims[self._alias[value]] if isinstance(value, fx.Node) else value

        tags = getattr(node.target, "tags", ())
        args = [dims(value) if isinstance(value, fx.Node) else tree_map(dims, value) for value in node.args]
        options = {key: tree_map(dims, value) for key, value in node.kwargs.items()}
        return TracedCall(operation, args, options, shape, torch.Tag.pointwise in tags)


def _operation(node: fx.Node) -> str:
    """Return the name of an operation without namespace, overload and the mark of in-place variants."""
    name = getattr(node.target, "_opname", None) or getattr(node.target, "__name__", str(node.target))
    return str(name).rstrip("_") or str(name)


def _is_of_torch(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") in {"aten", "prims"}


def _is_alias(operation: str, node: fx.Node, value: Tensor) -> bool:
    if operation in _ALIASES:
        return True
    if operation == "dropout":
        return not node.args[1] or not node.args[2]
    first = node.args[0] if node.args else None
    before = first.meta.get("val") if isinstance(first, fx.Node) else None
    return operation == "to" and isinstance(before, Tensor) and before.dtype == value.dtype


def _input_names(value: Tensor) -> tuple[str, ...]:
    if value.dim() == 2 and not value.is_floating_point():
        return ("batch", "sequence")
    return _INPUT_NAMES.get(value.dim(), ("batch", FEATURES, *["pixels"] * (value.dim() - 2)))


def _named(operators: list[Operator]) -> Iterator[Operator]:
    """Yield the operators with names: the module's name, followed by the operation if the module has several."""
    sizes = Counter(each.module for each in operators)
    counts: Counter[str] = Counter()
    for each in operators:
        if each.kind == "input":
            yield each
            continue
        alone = each.module and sizes[each.module] == 1
        name = each.module if alone else f"{each.module}.{each.name}".removeprefix(".")
        counts[name] += 1
        yield replace(each, name=name if counts[name] == 1 else f"{name}_{counts[name]}")
