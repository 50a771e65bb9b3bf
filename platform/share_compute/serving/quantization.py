"""Weights in eight bits: each row of a linear layer as integers, and one number that scales them.

Symmetric, by a row's largest number, as torchao's weight-only int8 has it; so a row can be made from its own numbers
alone, and a shard never stands in memory as floats. Inputs are rounded to bfloat16 and multiplied with the integers,
whose products are exact; sums are in float32. For few rows torch has a kernel that reads the integers as they are:
that reading is what a token's time goes to. For many it pays to make floats of them, some rows of the matrix at a time.
Both give the same within the rounding of their sums.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from share_compute.errors import UserError

INTEGERS, SCALE = ".int8", ".int8_scale"
"""What the two tensors of a layer are called, in place of ``.weight``."""
_LARGEST = 127
_FEW_ROWS = 16
"""Up to so many rows of inputs the kernel for few is faster."""
_KERNEL_STEP = 16
"""Inputs that the kernel reads at one time: of other numbers it would read beyond their end."""
_BLOCK = 2**22
"""Weights that are floats at one time."""
_LEAST_SHARE = 0.9
"""Of a layer's matrices; where linear layers are less of it, int8 would save little, and plans would be wrong."""


def scale_of(rows: Tensor, name: str = "a weight") -> Tensor:
    """Return what the integers of each row of weights are to be multiplied by ``[out]``, float32.

    Args:
        rows: ``[out, in]``.
        name: of the weight, for errors.

    Raises:
        UserError: a number is not finite.
    """
    scale = rows.float().abs().amax(1) / _LARGEST
    if not bool(scale.isfinite().all()):
        raise UserError(f"{name} has a number that is not finite", mend="serve a checkpoint from before that")
    scale[scale == 0] = 1
    return scale


def integers_of(rows: Tensor, scale: Tensor) -> Tensor:
    """Return rows of weights as integers ``[out, in]``, with their scale."""
    return (rows.float() / scale[:, None]).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)


def is_quantized(name: str) -> bool:
    """Return whether a stored name is that of integers."""
    return name.endswith(INTEGERS)


def scale_name(name: str) -> str:
    """Return the stored name of the scale of the integers called ``name``."""
    return name.removesuffix(INTEGERS) + SCALE


def weight_of(name: str) -> str:
    """Return the stored name of the weight that a tensor called ``name`` is made of."""
    return name.removesuffix(INTEGERS).removesuffix(SCALE) + ".weight"


class Int8Linear(nn.Module):
    """A linear layer whose weights are integers; on the meta device until it is given memory.

    Args:
        layer: to do what it does.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        size = layer.out_features, layer.in_features
        self.out_features, self.in_features = size
        integers = torch.empty(size, dtype=torch.int8, device="meta")
        self.int8 = nn.Parameter(integers, requires_grad=False)
        self.int8_scale = nn.Parameter(torch.empty(size[0], device="meta"), requires_grad=False)
        self.register_parameter("bias", layer.bias)
        # The kernel would round scales to bfloat16: it is given ones.
        self._ones = torch.ones(size[0], dtype=torch.bfloat16)
        self._few = 0 if self.in_features % _KERNEL_STEP else _FEW_ROWS

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply ``[..., in]``; return ``[..., out]``."""
        own = self._parameters  # looked up as attributes they would take longer
        integers, scale, bias = own["int8"], own["int8_scale"], own["bias"]
        assert integers is not None
        assert scale is not None
        products = self._products(inputs.reshape(-1, self.in_features).bfloat16(), integers)
        outputs = products.float().mul_(scale)
        if bias is not None:
            outputs += bias
        return outputs.to(inputs.dtype).view(*inputs.shape[:-1], self.out_features)

    __call__ = forward
    """Nobody hooks into what serves."""

    def _products(self, rows: Tensor, integers: Tensor) -> Tensor:
        """Return ``[rows, out]`` in bfloat16, not yet scaled."""
        if rows.device.type != "cpu":
            return linear(rows, integers.bfloat16())
        if len(rows) <= self._few:
            return torch._weight_int8pack_mm(rows, integers, self._ones)  # noqa: SLF001 - it has no other name
        wide, step = rows.float(), max(1, _BLOCK // self.in_features)
        blocks = [linear(wide, block.float()).bfloat16() for block in torch.split(integers, step)]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)


def quantize(model: nn.Module, shared: Set[str]) -> None:
    """Put an `Int8Linear` in the place of each linear layer inside whose weights nobody else uses.

    Args:
        model: sketched.
        shared: names of weights that others use, too.
    """
    for path, part in list(model.named_modules()):
        for name, child in list(part.named_children()):
            full = f"{path}.{name}".lstrip(".")
            if type(child) is nn.Linear and f"{full}.weight" not in shared:
                setattr(part, name, Int8Linear(child))


def require_linear_layers(model: nn.Module, shared: Set[str]) -> None:
    """Make sure that int8 saves what plans count on.

    Args:
        model: the whole one, sketched.
        shared: names of weights that others use, too.

    Raises:
        UserError: too much of it is not in linear layers.
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
            mend="choose dtype bfloat16",
        )
