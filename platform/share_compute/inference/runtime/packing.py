"""Weight packing: reorder weights with oneDNN, to speed up products of a few rows on a CPU.

Products of one or two rows are faster with plain (unpacked) weights than with packed ones. So plain weights can be kept
in addition to packed ones, except in bfloat16. The operators for packing have no public name; torch.compile uses them,
too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from share_compute.inference.runtime.opaque import call_opaquely, numbered

_ROWS = 8
"""Number of rows that weights are packed for; products of other numbers of rows work as well."""
_PLAIN_ROWS = 2
"""Maximum number of rows that are multiplied with plain weights, if plain weights are kept."""
_SMALL = 2**19
"""Minimum number of weights in a float32 matrix for packing it; packing smaller matrices saves no time."""


class PackedLinear(nn.Module):
    """A linear layer with packed weights.

    Args:
        layer: the linear layer to replace.
        plain: plain weights for products of few rows, in any memory order; None keeps packed ones only.
        is_shared: whether other modules use the layer's weights too.
    """

    def __init__(self, layer: nn.Linear, plain: Tensor | None, *, is_shared: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        self._shared = (layer,) if is_shared else None
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _ROWS)  # noqa: SLF001
        # A tuple, because looking up the parameters of a module is slow.
        self._weights: tuple[Tensor | None, Tensor, Tensor | None] = (plain, packed, layer.bias)
        self._few = _PLAIN_ROWS * layer.in_features if plain is not None else -1
        self._number = numbered(self)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001

    @property
    def weight(self) -> Tensor:
        """Weights as in `nn.Linear`, ``[out, in]``; some models read the dtype of this attribute."""
        plain, packed, _ = self._weights
        return packed.to_dense() if plain is None else plain

    @property
    def keeps_plain(self) -> bool:
        """Whether the plain weights are in memory in addition to the packed ones."""
        return self._weights[0] is not None

    def smaller(self) -> nn.Module:
        """Return a replacement that does not hold a second copy of the weights.

        It is the original layer if other modules share its weights, else this layer with packed weights only.
        """
        if self._shared is not None:
            return self._shared[0]
        _, packed, bias = self._weights
        self._weights, self._few = (None, packed, bias), -1
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply ``[..., in]``; return ``[..., out]``."""
        if torch.compiler.is_compiling():
            return call_opaquely(inputs, self._number, self.out_features)
        plain, packed, bias = self._weights
        if inputs.numel() <= self._few and plain is not None:
            return linear(inputs, plain, bias)
        outputs: Tensor = self._multiply(inputs, packed, bias, "none", [], "")
        return outputs

    __call__ = forward
    """Alias that bypasses `nn.Module.__call__`, which searches for hooks."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether weights of a dtype can be packed on a device: a CPU for which oneDNN has kernels of this dtype."""
    operators = torch.ops.mkldnn
    if device.type != "cpu" or not torch._C._has_mkldnn:  # noqa: SLF001
        return False
    if not hasattr(operators, "_linear_pointwise") or not hasattr(operators, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(operators._is_mkldnn_bf16_supported())  # noqa: SLF001
    if dtype == torch.float16:
        return bool(operators._is_mkldnn_fp16_supported())  # noqa: SLF001
    return dtype == torch.float32


def count_uses(module: nn.Module) -> Counter[Tensor]:
    """Return the number of modules inside a module that use each parameter."""
    return Counter(parameter for part in module.modules() for parameter in part.parameters(recurse=False))


def pack(module: nn.Module, *, keeps_plain: bool, shared: Sequence[Tensor] = ()) -> None:
    """Pack the linear layers inside a module, except small ones in float32.

    A second call with ``keeps_plain=False`` frees second copies of weights. Layers that share their weights with other
    modules, such as an embedding, are packed only with ``keeps_plain``.

    Args:
        module: module whose weights are filled.
        keeps_plain: whether plain weights are kept in addition to packed ones, which takes twice the memory.
        shared: weights inside the module that modules elsewhere use as well.
    """
    uses = count_uses(module)
    # The list has names, because references to layers would keep the plain weights of packed layers in memory.
    places = [
        (part, name) for part in module.modules() for name, child in part.named_children() if _may_pack(child)
    ]
    for part, name in places:
        layer = getattr(part, name)
        if not isinstance(layer, PackedLinear):
            is_shared = uses[layer.weight] > 1 or any(layer.weight is tensor for tensor in shared)
            layer = _packed(layer, keeps_plain=keeps_plain, is_shared=is_shared)
        elif not keeps_plain:
            layer = layer.smaller()
        setattr(part, name, layer)
        del layer


def _may_pack(layer: nn.Module) -> bool:
    if isinstance(layer, PackedLinear):
        return True
    return type(layer) is nn.Linear and (layer.weight.numel() >= _SMALL or layer.weight.itemsize <= 2)


def _packed(layer: nn.Linear, *, keeps_plain: bool, is_shared: bool) -> nn.Module:
    if not keeps_plain:
        return layer if is_shared else PackedLinear(layer, None)
    weight = layer.weight.detach()
    if weight.dtype == torch.bfloat16:
        return PackedLinear(layer, None, is_shared=is_shared)
    # With more outputs than inputs, products of one float32 row are faster with column-major than row-major weights.
    is_tall = layer.out_features > layer.in_features and weight.dtype == torch.float32
    plain = weight.t().contiguous().t() if is_tall and not is_shared else weight
    return PackedLinear(layer, plain, is_shared=is_shared)
