"""Weights in eight bits: each row of a linear layer as integers, and one number that scales them.

Symmetric, by a row's largest number, as torchao's weight-only int8 has it; so a row can be made from its own numbers
alone, and a shard never stands in memory as floats. Inputs are rounded to bfloat16 and multiplied with the integers,
whose products are exact; sums are in float32. For few rows torch has a kernel that reads the integers as they are:
that reading is what a token's time goes to. For many it pays to make floats of them, some rows of the matrix at a time.
Both give the same within the rounding of their sums.
"""

from __future__ import annotations

import math
from collections.abc import Set

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from share_compute.errors import UserError

INTEGERS, SCALE = ".int8", ".int8_scale"
"""What the two tensors of a layer are called, in place of ``.weight``."""
_LARGEST = 127
_FEW_ROWS = 32
"""Up to so many rows of inputs the kernel for few is faster."""
_BLOCK = 2**22
"""Weights that are floats at one time."""
_LEAST_SHARE = 0.9
"""Of a layer's matrices; where linear layers are less of it, int8 would save little, and plans would be wrong."""


def quantized(rows: Tensor, name: str = "a weight") -> tuple[Tensor, Tensor]:
    """Return rows of weights as integers ``[out, in]``, and what each row is to be multiplied by ``[out]``, float32.

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
    integers = (rows.float() / scale[:, None]).round_().clamp_(-_LARGEST, _LARGEST)
    return integers.to(torch.int8), scale


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
        self._ones = torch.ones(size[0], dtype=torch.bfloat16)

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply ``[..., in]``; return ``[..., out]``."""
        own = (
            self._parameters
        )  # a module looks slowly for its parameters, and this is asked for a hundred times a token
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
        if len(rows) <= _FEW_ROWS:
            return torch._weight_int8pack_mm(rows, integers, self._ones)  # noqa: SLF001 - it has no other name
        wide, step = rows.float(), max(1, _BLOCK // self.in_features)
        blocks = [linear(wide, block.float()).bfloat16() for block in torch.split(integers, step)]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)


def quantize(model: nn.Module, shared: Set[str]) -> None:
    """Put an `Int8Linear` in the place of each linear layer inside whose weights nobody else uses.

    Args:
        model: sketched.
        shared: names of weights that others use, too.

    Raises:
        UserError: too much of it is not in linear layers.
    """
    saved = 0
    for path, part in list(model.named_modules()):
        for name, child in list(part.named_children()):
            full = f"{path}.{name}".lstrip(".")
            if type(child) is nn.Linear and f"{full}.weight" not in shared:
                saved += child.weight.numel()
                setattr(part, name, Int8Linear(child))
    kept = sum(
        math.prod(parameter.shape)
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and parameter.dtype != torch.int8 and not _is_table(model, name, shared)
    )
    if saved < _LEAST_SHARE * (saved + kept):
        raise UserError(
            "only the weights of linear layers become int8, and this architecture has others",
            mend="choose dtype bfloat16",
        )


def _is_table(model: nn.Module, name: str, shared: Set[str]) -> bool:
    """Whether a parameter is looked up, or is that of a head that is tied to what is."""
    return name in shared or isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)
