"""Sharding strategies of an operator over a row of devices: one for each axis that can be cut, and ``replicated``.

Layouts have the names of DTensor's placements (``torch.distributed.tensor``): ``Shard(1)``, ``Replicate()`` and
``Partial()``. `Strategy` follows from the equation alone, as in GSPMD (Xu et al., 2021) and in the SOAP space of
FlexFlow (Jia et al., 2019): tensors with the axis are sharded, and other inputs are replicated. If the operator sums
over the axis, its output is partial.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from share_compute.planning.operators.graph import NO_AXIS, Operator, OperatorGraph

REPLICATE = "Replicate()"
PARTIAL = "Partial()"
REPLICATED = "replicated"
"""Strategy in which each device computes the whole operator."""
PARTIAL_GRADIENT = "partial_gradient"
"""Strategy of a fork: the tensor is replicated, and the gradients of its readers are added over the devices later."""


def shard(dim: int) -> str:
    """Return the placement that gives each device an equal part of dimension ``dim`` of a tensor."""
    return f"Shard({dim})"


class TensorLayout(NamedTuple):
    """Placements of a tensor in the forward pass, and of its gradient in the backward pass."""

    value: str
    gradient: str


@dataclass(frozen=True, slots=True)
class Strategy:
    """Way to divide an operator between devices."""

    name: str
    """Name of the axis that is cut, or ``replicated``."""
    inputs: tuple[TensorLayout, ...]
    """Layout that the operator needs of each input."""
    output: TensorLayout
    """Layout of the output, and the layout that the operator needs of the output's gradient."""
    is_sharded: bool = True
    """Whether each device computes a part of the operator."""


@dataclass(frozen=True, slots=True)
class StrategyOptions:
    """Strategies of an operator on a number of devices."""

    strategies: tuple[Strategy, ...]
    refused: Mapping[str, str]
    """Reason why an axis cannot be cut, by the name that its strategy would have."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the legal strategies."""
        return tuple(strategy.name for strategy in self.strategies)


def options_of(operator: Operator, graph: OperatorGraph, devices: int) -> StrategyOptions:
    """Return the legal strategies of an operator on a number of devices, and the reasons against the others."""
    found, refused = list[Strategy](), dict[str, str]()
    for letter, axis in operator.axes.items():
        if axis.refusal:
            refused.setdefault(axis.name, axis.refusal)
        elif axis.parts % devices:
            what = axis.name if axis.parts == axis.size else f"{axis.name} in {axis.parts} pieces"
            refused[axis.name] = (
                f"{devices} devices cannot divide {axis.parts} evenly ({what} of {operator.name})"
            )
        elif letter != NO_AXIS:
            found.append(_cut(operator, letter))
    found.append(_uncut(operator, REPLICATED, REPLICATE))
    if operator.kind in {"input", "fork"} and graph.tensors[operator.output].has_gradient:
        found.append(_uncut(operator, PARTIAL_GRADIENT, PARTIAL))
    legal = {strategy.name for strategy in found}
    return StrategyOptions(tuple(found), {name: why for name, why in refused.items() if name not in legal})


def _cut(operator: Operator, letter: str) -> Strategy:
    output = operator.output_letters
    # An input without the summed axis, like the bias of a linear layer, may be added once. Then its gradient is not a
    # partial sum.
    is_partial = letter in output or operator.axes[letter].has_factors
    missing = TensorLayout(REPLICATE, PARTIAL if is_partial else REPLICATE)
    inputs = tuple(
        _same(shard(own.index(letter))) if letter in own else missing for own in operator.input_letters
    )
    given = _same(shard(output.index(letter))) if letter in output else TensorLayout(PARTIAL, REPLICATE)
    return Strategy(operator.axes[letter].name, inputs, given)


def _same(placement: str) -> TensorLayout:
    return TensorLayout(placement, placement)


def _uncut(operator: Operator, name: str, gradient: str) -> Strategy:
    layout = TensorLayout(REPLICATE, gradient)
    return Strategy(name, tuple(layout for _ in operator.inputs), layout, is_sharded=False)
