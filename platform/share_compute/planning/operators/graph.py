"""Operator graphs: the operators of one layer, the tensors between them, and the axes along which they can be cut.

An operator is described as in an einsum. Each letter names an axis of the operator's loops, and an equation gives the
letters of the dimensions of each tensor: ``bsi,oi->bso`` is a linear layer on ``[batch, sequence, in]`` with weights
``[out, in]``. A dot marks a dimension without an axis, such as a broadcast dimension of size 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

OperatorKind = Literal[
    "attention",
    "copy",
    "elementwise",
    "embedding",
    "experts",
    "fork",
    "input",
    "matmul",
    "norm",
    "other",
    "reduction",
    "reshape",
    "softmax",
]
TensorRole = Literal["activation", "parameter", "constant"]
NO_AXIS = "."
"""Letter of a dimension without an axis."""
FEATURES = "features"
"""Name of the last dimension of hidden states."""
COLUMN = "column"
"""Name of the strategy that cuts the features of an output."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Tensor of a graph."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int
    """Bytes of one number."""
    role: TensorRole = "activation"
    has_gradient: bool = True
    """Whether the backward pass computes its gradient; False for integers and frozen parameters."""

    @property
    def size_bytes(self) -> int:
        """Return the size of the whole tensor in bytes."""
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class Axis:
    """Axis of an operator's loops."""

    name: str
    """Name of the strategy that cuts this axis, such as ``row``, ``column``, ``batch``, ``sequence`` or ``heads``."""
    size: int
    parts: int
    """Number of pieces that cannot be cut: an axis of 6 heads with 64 numbers each has 6."""
    contracted: bool = False
    """Whether the operator sums over the axis, so that a device with a part of it computes a partial sum."""
    has_factors: bool = False
    """Whether inputs without this contracted axis are factors of each summand: a device has a part of their gradient.
    Otherwise, they are added once, like a bias."""
    refusal: str = ""
    """Reason why the axis cannot be cut; empty if it can."""


@dataclass(frozen=True, slots=True)
class Operator:
    """Operator of a graph, with one output."""

    name: str
    """Module and operation within the layer: ``mlp.down_proj``, or ``self_attn.mul_2``."""
    kind: OperatorKind
    inputs: tuple[str, ...]
    """Names of its input tensors: activations, parameters and constants."""
    output: str
    equation: str
    """Letters of the dimensions of the inputs and of the output."""
    axes: Mapping[str, Axis] = field(default_factory=dict)
    """Axes by letter."""
    flops: int = 0
    """Floating-point operations of a forward pass in matrix products; 0 for operators that only move data."""
    target: str = ""
    """Name of the operation in torch, such as ``aten.linear.default``."""
    module: str = ""
    """Path of the module within the layer; empty for the layer itself."""

    @property
    def input_letters(self) -> tuple[str, ...]:
        """Return the letters of the dimensions of each input."""
        return tuple(self.equation.partition("->")[0].split(",")) if self.inputs else ()

    @property
    def output_letters(self) -> str:
        """Return the letters of the output's dimensions."""
        return self.equation.partition("->")[2]


@dataclass(frozen=True)
class OperatorGraph:
    """Operators of one layer in topological order, and their tensors.

    Raises:
        ValueError: an operator reads a tensor before it is computed, or an equation does not fit its tensors.
    """

    name: str
    operators: tuple[Operator, ...]
    tensors: Mapping[str, TensorSpec]
    output: str
    """Name of the tensor that the layer returns."""
    repeats: bool = True
    """Whether the output of a layer may be the input of another one with the same operators."""

    def __post_init__(self) -> None:
        known = {name for name, tensor in self.tensors.items() if tensor.role != "activation"}
        for operator in self.operators:
            for tensor in operator.inputs:
                if tensor not in known:
                    raise ValueError(f"{operator.name} reads {tensor} before an operator computes it")
            known.add(operator.output)
            letters = [*operator.input_letters, operator.output_letters]
            for tensor, each in zip((*operator.inputs, operator.output), letters, strict=True):
                if len(each) != len(self.tensors[tensor].shape):
                    raise ValueError(
                        f"{operator.name}: {operator.equation!r} does not fit {self.tensors[tensor]}"
                    )

    @cached_property
    def producer(self) -> dict[str, int]:
        """Index of the operator that computes each activation, by tensor."""
        return {operator.output: place for place, operator in enumerate(self.operators)}

    @cached_property
    def edges(self) -> tuple[tuple[int, int, int], ...]:
        """Activations that pass between operators, as (producer, consumer, index among the consumer's inputs)."""
        return tuple(
            (self.producer[tensor], place, index)
            for place, operator in enumerate(self.operators)
            for index, tensor in enumerate(operator.inputs)
            if self.tensors[tensor].role == "activation"
        )

    def forked(self) -> OperatorGraph:
        """Return the graph with a ``fork`` after each tensor that several operators read.

        A fork copies nothing. It redistributes the tensor once for all of its readers, and adds their gradients.
        Without a fork, each reader would pay for its own redistribution.
        """
        readers: dict[str, int] = {}
        for operator in self.operators:
            for tensor in operator.inputs:
                readers[tensor] = readers.get(tensor, 0) + 1
        tensors, operators = dict(self.tensors), list[Operator]()
        renamed: dict[str, str] = {}
        for operator in self.operators:
            inputs = tuple(renamed.get(tensor, tensor) for tensor in operator.inputs)
            operators.append(replace(operator, inputs=inputs))
            # An input operator takes every layout itself.
            if operator.kind != "input" and readers.get(operator.output, 0) > 1:
                fork = _fork(operator, tensors[operator.output])
                tensors[fork.output] = replace(tensors[operator.output], name=fork.output)
                renamed[operator.output] = fork.output
                operators.append(fork)
        return replace(
            self,
            operators=tuple(operators),
            tensors=tensors,
            output=renamed.get(self.output, self.output),
        )


def _fork(operator: Operator, tensor: TensorSpec) -> Operator:
    axes = {letter: operator.axes[letter] for letter in operator.output_letters if letter != NO_AXIS}
    whole = {letter: replace(axis, refusal="", contracted=False) for letter, axis in axes.items()}
    letters = operator.output_letters
    return Operator(
        name=f"{operator.name}.fork",
        kind="fork",
        inputs=(tensor.name,),
        output=f"{tensor.name}.fork",
        equation=f"{letters}->{letters}",
        axes=whole,
        module=operator.module,
    )


def input_operator(tensor: TensorSpec, names: Iterable[str]) -> Operator:
    """Return the operator that gives a layer its input, in any layout.

    Args:
        tensor: the input.
        names: names of its dimensions.
    """
    letters, axes = "", dict[str, Axis]()
    for name, size in zip(names, tensor.shape, strict=True):
        letter = chr(ord("a") + len(axes)) if size > 1 else NO_AXIS
        letters += letter
        if size > 1:
            taken = {axis.name for axis in axes.values()}
            strategy = COLUMN if name == FEATURES else name
            axes[letter] = Axis(strategy if strategy not in taken else f"{strategy}{len(axes)}", size, size)
    return Operator(
        name="input", kind="input", inputs=(), output=tensor.name, equation=f"->{letters}", axes=axes
    )
