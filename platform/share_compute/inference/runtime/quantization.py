"""Weight-only int8 quantization: each row of a linear layer's weights becomes int8 values with one scale.

Quantization is symmetric: the scale is a row's largest absolute value, divided by 127. Inputs are rounded to bfloat16.
For a few input rows on a CPU, torch has a kernel that reads the integers directly. In all other cases the integers are
converted to floats first.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from share_compute.errors import UserError
from share_compute.inference.runtime.opaque import call_opaquely, numbered

INTEGERS, SCALE = ".int8", ".int8_scale"
"""Suffixes that replace ``.weight`` in the names of the two tensors of a quantized weight: int8 values and scales."""
_LARGEST = 127
_FEW_ROWS = 16
"""Maximum number of input rows for which torch's kernel for few rows is faster, on a CPU."""
_KERNEL_STEP = 16
"""Number of weights that torch's kernel reads at one time. The kernel would read beyond the end of a row whose length
is not a multiple of this number."""
_BLOCK = 2**22
"""Number of weights that a CPU converts to floats at one time, rounded down to whole rows but at least one row."""
_LEAST_SHARE = 0.9
"""Minimum fraction of matrix weights that must be in linear layers; embeddings and shared weights are not counted.

Below this fraction, int8 saves less memory than plans assume.
"""


def scale_of(rows: Tensor, name: str = "a weight") -> Tensor:
    """Return the scale of each row of weights, ``[out]``, float32.

    Args:
        rows: weights ``[out, in]``.
        name: name of the weight, for errors.

    Raises:
        UserError: a number is not finite.
    """
    scale = rows.float().abs().amax(1) / _LARGEST
    if not bool(scale.isfinite().all()):
        raise UserError(f"{name} has a number that is not finite", hint="serve a checkpoint from before that")
    scale[scale == 0] = 1
    return scale


def integers_of(rows: Tensor, scale: Tensor) -> Tensor:
    """Quantize rows of weights with ``scale``; return int8 values ``[out, in]``."""
    return (rows.float() / scale[:, None]).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)


def is_quantized(name: str) -> bool:
    """Return whether a stored tensor of this name holds the int8 values of quantized weights."""
    return name.endswith(INTEGERS)


def scale_name(name: str) -> str:
    """Return the stored name of the scales that belong to the int8 tensor called ``name``."""
    return name.removesuffix(INTEGERS) + SCALE


def weight_of(name: str) -> str:
    """Return the stored name of the weight whose int8 values or scales are called ``name``."""
    return name.removesuffix(INTEGERS).removesuffix(SCALE) + ".weight"


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, created on the meta device (without memory).

    Args:
        layer: the linear layer to replace.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        size = layer.out_features, layer.in_features
        self.out_features, self.in_features = size
        integers = torch.empty(size, dtype=torch.int8, device="meta")
        self.int8 = nn.Parameter(integers, requires_grad=False)
        self.int8_scale = nn.Parameter(torch.empty(size[0], device="meta"), requires_grad=False)
        self.register_parameter("bias", layer.bias)
        # The kernel would round scales to bfloat16, so it gets ones, and `forward` applies the scales in float32.
        self._ones = torch.ones(size[0], dtype=torch.bfloat16)
        self._number = numbered(self)
        self._few = 0 if self.in_features % _KERNEL_STEP else _FEW_ROWS

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply ``[..., in]``; return ``[..., out]``."""
        if torch.compiler.is_compiling():
            return call_opaquely(inputs, self._number, self.out_features)
        own = self._parameters  # faster than attribute lookups
        integers, scale, bias = own["int8"], own["int8_scale"], own["bias"]
        assert integers is not None
        assert scale is not None
        products = self._products(inputs.reshape(-1, self.in_features).bfloat16(), integers)
        outputs = products.float().mul_(scale)
        if bias is not None:
            outputs += bias
        return outputs.to(inputs.dtype).view(*inputs.shape[:-1], self.out_features)

    __call__ = forward
    """Alias that bypasses `nn.Module.__call__`, which searches for hooks."""

    def _products(self, rows: Tensor, integers: Tensor) -> Tensor:
        """Multiply inputs ``[rows, in]`` with integers ``[out, in]``; return ``[rows, out]``, bfloat16, unscaled."""
        if rows.device.type != "cpu":
            return linear(rows, integers.bfloat16())
        if len(rows) <= self._few:
            return torch._weight_int8pack_mm(rows, integers, self._ones)  # noqa: SLF001 - it has no other name
        wide, step = rows.float(), max(1, _BLOCK // self.in_features)
        blocks = [linear(wide, block.float()).bfloat16() for block in torch.split(integers, step)]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)


def quantize(model: nn.Module, shared: Set[str]) -> None:
    """Replace each linear layer of a model by an `Int8Linear`, except layers with shared weights.

    Args:
        model: model to change in place.
        shared: names of weights that several modules use.
    """
    for path, part in list(model.named_modules()):
        for name, child in list(part.named_children()):
            full = f"{path}.{name}".lstrip(".")
            if type(child) is nn.Linear and f"{full}.weight" not in shared:
                setattr(part, name, Int8Linear(child))


def require_linear_layers(model: nn.Module, shared: Set[str]) -> None:
    """Check that enough of a model's weights are in linear layers for int8 to save memory.

    Args:
        model: the whole model.
        shared: names of weights that several modules use.

    Raises:
        UserError: too many of the model's weights are not in linear layers.
    """
    saved = kept = 0
    for path, part in model.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.dim() < 2 or isinstance(part, nn.Embedding) or f"{path}.{name}" in shared:
                continue
            if type(part) is nn.Linear:
                saved += parameter.numel()
            else:
                kept += parameter.numel()
    if saved < _LEAST_SHARE * (saved + kept):
        raise UserError(
            "only the weights of linear layers become int8, and this architecture has others",
            hint="choose dtype bfloat16",
        )
