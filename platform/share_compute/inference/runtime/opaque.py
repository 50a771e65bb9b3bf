"""Linear layers that compiled code calls as they are, because torch's compiler does not know their weights.

Compiled code gets the number of a layer as a tensor, so that layers of one class share their code.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

_LAYERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
_NUMBERS = count()


def numbered(layer: nn.Module) -> Tensor:
    """Return a tensor with a new number for a layer, with which `call_opaquely` finds it."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return torch.tensor(number, device="cpu")


def _call(inputs: Tensor, number: Tensor, num_outputs: int) -> Tensor:
    outputs: Tensor = _LAYERS[int(number)].forward(inputs)
    assert outputs.shape[-1] == num_outputs
    return outputs.contiguous()


def _called(inputs: Tensor, number: Tensor, num_outputs: int) -> Tensor:  # noqa: ARG001 - the signature of `_call`
    return inputs.new_empty(*inputs.shape[:-1], num_outputs)


_LIBRARY = torch.library.Library("share_compute", "FRAGMENT")
_LIBRARY.define("linear(Tensor inputs, Tensor number, int num_outputs) -> Tensor")
_LIBRARY.impl("linear", _call, "CPU")
torch.library.register_fake("share_compute::linear", _called, lib=_LIBRARY)

call_opaquely: Callable[[Tensor, Tensor, int], Tensor] = torch.ops.share_compute.linear.default
"""Operator that computes ``[..., in]`` -> ``[..., num_outputs]`` with the layer of a number; see `numbered`."""
