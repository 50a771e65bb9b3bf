"""Compression of the activations and gradients that cross the boundaries between the stages of a model.

A boundary at layer ``l`` is between layer ``l - 1`` and layer ``l``. If the model is cut there, the sender encodes each
tensor, and the receiver decodes it. Otherwise `round_inside` encodes and decodes in the shard that holds both layers.
So the place of the cut does not change the computed bits.

A tensor that the codec refuses, because a value is not finite or too large, is passed on unchanged. The checks of the
next stage then find the value, as they do without compression.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from share_compute.compression.codec import FLOATS
from share_compute.compression.quantization import FloatCodec, IntegerCodec
from share_compute.compression.rows import RowCodec
from share_compute.errors import UserError, VerificationFailed
from share_compute.models.boundary import Expected
from share_compute.models.stage import Stage
from share_compute.specification.boundaries import BoundaryCodec, BoundaryCompression

_CODECS: Final[dict[BoundaryCodec, RowCodec]] = {
    "none": FloatCodec(),
    "bf16": FloatCodec(torch.bfloat16),
    "int8": IntegerCodec(8),
}


def boundary_bytes(codec: BoundaryCodec, numbers: int) -> int:
    """Return the bytes of a tensor with this many numbers; without a codec, they are float32."""
    return _CODECS[codec].num_bytes((numbers,))


def encoded(tensor: Tensor, codec: BoundaryCodec) -> Tensor:
    """Return the payload of a tensor, uint8 ``[bytes]``.

    Without a codec, or if the codec refuses the tensor, return the tensor itself.
    """
    if codec == "none" or tensor.dtype not in FLOATS:
        return tensor
    try:
        return _CODECS[codec].encode(tensor, {})[0]
    except UserError:
        return tensor


def decoded(received: Tensor, expected: Expected) -> Tensor:
    """Return the values of a tensor from another stage; float32 if tensors are compressed. They may not be finite.

    Args:
        received: result of `encoded`, as it arrived.
        expected: requirements on the tensor.

    Raises:
        VerificationFailed: the tensor has a wrong shape or dtype, or its payload is damaged.
    """
    codec = expected.codec
    if codec != "none" and received.dtype == torch.uint8:
        assert expected.shape is not None
        return _CODECS[codec].decode(received, expected.shape)
    what = expected.misfit(received)
    if what is None and codec != "none":
        if encoded(received, codec) is not received:
            what = "it is not compressed"
        received = received.float()
    if what is not None:
        raise VerificationFailed(what, hint="check memory and software of the machine that sent it")
    return received


def rounded(tensor: Tensor, codec: BoundaryCodec) -> Tensor:
    """Return the tensor that the other side of a boundary receives, as float32 on the device of ``tensor``."""
    payload = encoded(tensor, codec)
    if payload is tensor:
        return tensor.float()
    return _CODECS[codec].decode(payload, tensor.shape).to(tensor.device)


def round_inside(stage: Stage, boundaries: BoundaryCompression) -> None:
    """Round tensors at a boundary inside a shard in training, as if the model were cut there.

    Values are not rounded in evaluations.
    """
    for layer, module in stage.layers.items():
        codec = boundaries.codec(layer)
        if layer != stage.shard.start and codec != "none":
            module.register_forward_pre_hook(_Rounding(codec))


class _Rounding:
    """Hook that rounds the inputs of a layer and the gradient of these inputs.

    Args:
        codec: codec of both.
    """

    def __init__(self, codec: BoundaryCodec) -> None:
        self._codec: BoundaryCodec = codec

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not layer.training:
            return None
        hidden: Tensor = _Boundary.apply(inputs[0], self._codec)  # type: ignore[no-untyped-call]
        return (hidden, *inputs[1:])


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, hidden: Tensor, codec: BoundaryCodec) -> Tensor:
        context.codec, context.dtype = codec, hidden.dtype
        return rounded(hidden, codec)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return rounded(gradient, context.codec).to(context.dtype), None
