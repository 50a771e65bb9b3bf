"""Fuse linear layers that multiply the same inputs: query, key and value projections; gate and up projections.

For one or two rows, one product with all weights takes less time than one product for each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn

from share_compute.inference.runtime.packing import count_uses
from share_compute.inference.runtime.quantization import Int8Linear

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that transformers models call one after the other, with the same inputs."""


class FusedLinear(nn.Module):
    """Several linear layers as one.

    A call of one part computes the outputs of all parts, and keeps them for calls of the other parts with the same
    tensor. The first time, it compares the tensor with a copy. If the model changed the tensor between the calls,
    outputs are no longer kept.

    Args:
        layer: linear layer whose outputs are those of all parts, one after the other.
        sizes: number of outputs of each part.

    Attributes:
        keeps_outputs: whether outputs are kept; False after the model changed the tensor between two calls.
    """

    def __init__(self, layer: nn.Module, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layer = layer
        self.sizes = list(sizes)
        self._inputs: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}
        self.keeps_outputs = True
        self._is_checked = False
        self._copy: Tensor | None = None

    def part(self, index: int, inputs: Tensor) -> Tensor:
        """Return the outputs ``[..., size]`` of one part for inputs ``[..., in]``."""
        kept = self._outputs.pop(index, None) if inputs is self._inputs else None
        if kept is not None and self._copy is not None and not torch.equal(inputs, self._copy):
            self.keeps_outputs, kept = False, None
        if kept is None:
            self._outputs = dict(enumerate(self.layer(inputs).split(self.sizes, -1)))
            self._inputs, kept = inputs, self._outputs.pop(index)
            if not self.keeps_outputs:
                self._outputs = {}
            elif not self._is_checked:
                self._copy = inputs.clone()
        if not self._outputs:
            self._inputs = self._copy = None
            self._is_checked = True
        return kept


class FusedPart(nn.Module):
    """One of the layers in a `FusedLinear`, with the attributes of a linear layer that models read.

    The first part has the `FusedLinear` as a submodule, so that a walk over modules visits it once.

    Args:
        fused: all layers.
        index: position of this layer in ``fused``.
        layer: the layer that is replaced.
    """

    def __init__(self, fused: FusedLinear, index: int, layer: nn.Linear | Int8Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._index = index
        self._fused = (fused,)
        if index == 0:
            self.fused = fused

    @property
    def weight(self) -> Tensor:
        """Weights of this layer, ``[out, in]``."""
        (fused,) = self._fused
        return torch.split(cast("Tensor", fused.layer.weight), fused.sizes)[self._index]

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply ``[..., in]``; return ``[..., out]``."""
        return self._fused[0].part(self._index, inputs)

    __call__ = forward
    """Alias that bypasses `nn.Module.__call__`, which searches for hooks."""


def fuse_linears(module: nn.Module) -> None:
    """Replace linear layers inside a module that have the same inputs: each becomes a part of one fused layer.

    Layers stay unchanged if other modules share their weights, or if not all of them have a bias.

    Args:
        module: module whose weights are filled.
    """
    uses = count_uses(module)
    for parent in list(module.modules()):
        for names in _SIBLINGS:
            layers = {name: layer for name, layer in parent.named_children() if name in names}
            if len(layers) > 1 and _may_fuse(layers, uses):
                _fuse(parent, layers)


def _may_fuse(
    layers: Mapping[str, nn.Module], uses: Mapping[Tensor, int]
) -> TypeGuard[Mapping[str, nn.Linear | Int8Linear]]:
    first, *others = layers.values()
    return (
        type(first) in {nn.Linear, Int8Linear}
        and all(_shape(layer) == _shape(first) for layer in others)
        and all(uses[parameter] == 1 for layer in layers.values() for parameter in layer.parameters())
    )


def _shape(layer: nn.Module) -> tuple[type, object, bool]:
    """Return the properties in which fused layers must agree: class, number of inputs, and whether there is a bias."""
    return type(layer), getattr(layer, "in_features", None), getattr(layer, "bias", None) is None


def _fuse(parent: nn.Module, layers: Mapping[str, nn.Linear | Int8Linear]) -> None:
    first = next(iter(layers.values()))
    sizes = [layer.out_features for layer in layers.values()]
    with torch.device("meta"):
        plain = nn.Linear(first.in_features, sum(sizes), bias=first.bias is not None)
    whole = Int8Linear(plain) if isinstance(first, Int8Linear) else plain
    for name in dict(first.named_parameters()):
        parts = [layer.get_parameter(name).detach() for layer in layers.values()]
        setattr(whole, name, nn.Parameter(torch.cat(parts), requires_grad=False))
    fused = FusedLinear(whole, sizes)
    for index, (name, layer) in enumerate(layers.items()):
        setattr(parent, name, FusedPart(fused, index, layer))
