"""All codecs, and tensors for them."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import Tensor

from share_compute.compression.codec import Codec
from share_compute.compression.factory import codec_of
from share_compute.specification.compression import SPARSE_LOCO, CompressionSpec

SPECS: dict[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "bf16": {"name": "bf16"},
    "int8": {"name": "int8"},
    "int4": {"name": "int4"},
    "int2": {"name": "int2"},
    "sign": {"name": "sign"},
    "topk": {"name": "topk", "density": 0.1, "chunk": 100},
    "topk-bf16": {"name": "topk", "density": 0.1, "chunk": 64, "values": "bf16"},
    "topk-int8": {"name": "topk", "density": 0.3, "chunk": 300, "values": "int8"},
    "topk-int2": {"name": "topk", "density": 0.5, "chunk": 16, "values": "int2"},
    "sparse_loco": SPARSE_LOCO.model_dump(),
    "powersgd": {"name": "powersgd", "rank": 2},
}
EXACT = ("none", "bf16", "int8", "int4", "topk", "topk-bf16", "topk-int8")
"""Codecs whose decoded values are 0, or within a factor of 2 of the value."""
_SPEC: TypeAdapter[CompressionSpec] = TypeAdapter(CompressionSpec)


def spec_of(**options: Any) -> CompressionSpec:
    return _SPEC.validate_python(options)


def codec(name: str, *, feedback: float | None = None) -> Codec:
    """Return a codec of `SPECS`, with or without error feedback."""
    options = SPECS[name] if name == "none" else {**SPECS[name], "error_feedback": feedback}
    return codec_of(spec_of(**options), seed=3)


def encoded(one: Codec, tensor: Tensor) -> Tensor:
    """Return the payload of a parameter's first tensor."""
    return one.encode(tensor, one.begin("weight", tensor.shape))[0]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Return a tensor of any kind that codecs accept: with zeros, equal values, and rows of very different sizes."""
    shape = draw(
        st.sampled_from(
            [(), (0,), (1,), (3, 0), (255,), (256,), (257,), (700,), (40, 33), (17, 5, 9), (300, 8)]
        )
    )
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    tensor = torch.randn(shape, generator=source)
    if draw(st.booleans()):
        tensor = tensor.mul(2).round().div(2)  # zeros and ties
    if tensor.dim() > 1:
        tensor = tensor * 10.0 ** torch.randint(
            -3, 4, (len(tensor), *[1] * (tensor.dim() - 1)), generator=source
        )
        tensor = tensor.transpose(0, 1) if draw(st.booleans()) else tensor
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    if dtype != torch.float16:
        tensor = tensor * 10.0 ** draw(st.integers(-44, 25))
    return tensor.to(dtype)
