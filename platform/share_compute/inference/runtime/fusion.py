"""Fuse linear layers that multiply the same inputs: query, key and value projections; gate and up projections.

For one or two rows, one product with all weights takes less time than one product for each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn

from share_compute.inference.runtime.quantization import Int8Linear

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that transformers models call one after the other, with the same inputs."""


class FusedLinear(nn.Module):
    """Several linear layers as one.

    A call of one part computes the outputs of all parts, and keeps the others for calls with the same tensor. The first
    time, it compares this tensor with a copy: if a model changes the tensor between the calls, outputs are not kept.

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

    The first part has the `FusedLinear` as a submodule, so that walks over modules meet it once.

    Args:
        fused: all layers.
        index: position of this layer in ``fused``.
        layer: the layer that is replaced.
    """

    def __init__(self, fused: FusedLinear, index: int, layer: nn.Linear | Int8Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._index = index
        self._part = fused.part
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
        return self._part(self._index, inputs)

    __call__ = forward
    """Alias that bypasses `nn.Module.__call__`, which searches for hooks."""


def fuse_linears(module: nn.Module) -> None:
    """Replace linear layers inside a module that multiply the same inputs by parts of one layer.

    Layers stay as they are if other modules share their weights, or if not all of them have a bias.

    Args:
        module: module whose weights are filled.
    """
    uses: dict[int, int] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for parent in list(module.modules()):
        for names in _SIBLINGS:
            layers = {name: layer for name, layer in parent.named_children() if name in names}
            found = list(layers.values())
            if len(found) > 1 and _may_fuse(found, uses):
                _fuse(parent, dict(zip(layers, found, strict=True)))


def _may_fuse(
    layers: Sequence[nn.Module], uses: Mapping[int, int]
) -> TypeGuard[Sequence[nn.Linear | Int8Linear]]:
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    return (
        type(layers[0]) in {nn.Linear, Int8Linear}
        and len({(type(layer), layer.in_features, layer.bias is None) for layer in layers}) == 1
        and all(uses[id(parameter)] == 1 for parameter in parameters)
    )


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
