"""Opaque operators: compiled code calls them, and torch's compiler does not trace into them.

Linear layers with packed or int8 weights are one such operator, because the compiler does not know their weights.
Compiled code gets the number of a layer as a tensor, so that layers of one class share their code.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

_Library: Any = torch.library.Library  # it has no types
_LIBRARY = _Library("share_compute", "FRAGMENT")
_LAYERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
_NUMBERS = count()


def define_operator(schema: str, compute: Callable[..., Tensor], empty: Callable[..., Tensor]) -> Any:
    """Define an operator of torch for CPUs, and return it.

    Args:
        schema: name, arguments and result, as `torch.library.define` takes them.
        compute: computes the operator. Its result is contiguous, and shares no memory with the arguments.
        empty: returns an empty tensor of the result's shape and dtype.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, compute, "CPU")
    torch.library.register_fake(f"share_compute::{name}", empty, lib=_LIBRARY)
    return getattr(torch.ops.share_compute, name).default


def numbered(layer: nn.Module) -> Tensor:
    """Return a tensor with a new number for a layer; `call_opaquely` finds the layer by this number."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return torch.tensor(number, device="cpu")


def _call(inputs: Tensor, number: Tensor, num_outputs: int) -> Tensor:
    outputs: Tensor = _LAYERS[int(number)].forward(inputs)
    assert outputs.shape[-1] == num_outputs
    return outputs.contiguous()


def _called(inputs: Tensor, number: Tensor, num_outputs: int) -> Tensor:  # noqa: ARG001 - the signature of `_call`
    return inputs.new_empty(*inputs.shape[:-1], num_outputs)


call_opaquely: Callable[[Tensor, Tensor, int], Tensor] = define_operator(
    "linear(Tensor inputs, Tensor number, int num_outputs) -> Tensor", _call, _called
)
"""Operator that computes ``[..., in]`` -> ``[..., num_outputs]`` with the layer of a number; see `numbered`."""
