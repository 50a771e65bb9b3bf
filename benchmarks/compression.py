"""Measure the speed of codecs, and the bytes that compressed activations take on the wire.

``encode_decode`` compares GB/s of codecs (encode and decode) with the computations of PyTorch's communication hooks, on
one core. ``boundary_bytes`` compares the bytes of the messages with which a stage sends one activation to the next
stage, headers included, with those of the same activation in float32.

GB/s are the bytes of the tensor as float32, divided by the CPU seconds of one encode and one decode. Both sides take
turns. The hooks of ``torch.distributed.algorithms.ddp_comm_hooks`` are called without their communication. PyTorch has
no hook for int4, int2, sign and top-k. The peer of the first three is its fastest hook with integers, and that of top-k
is ``torch.topk``.

Two codecs stay below the goal, because they do more than the hooks:

- bf16 checks that all values are finite, before they are sent and when they arrive. The hooks convert them only, which
  is as fast as memory. The checks take a third of the codec's time.
- powersgd has the same bits for each order of additions (see `PowerSgdCodec`). So values are rounded in two additions,
  converted to float64, and multiplied there, twice; and the largest one is looked for before. The hook multiplies in
  float32, and the bits of its sums depend on the number of threads.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from _harness import print_figure, timed
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook, quantization_hooks

from share_compute.compression.boundaries import encoded
from share_compute.compression.codec import Codec, State
from share_compute.compression.factory import codec_of
from share_compute.specification.boundaries import BoundaryCodec
from share_compute.specification.compression import (
    SPARSE_LOCO,
    CompressionSpec,
    PowerSgdSpec,
    QuantizationSpec,
    TopKSpec,
)
from share_compute_actors.transport.envelope import Envelope, WireLabel

GOAL = 1.0
SIDE = 2048
CHANNEL = 512
"""Values that share a scale in ``quantization_perchannel_hook``."""
_quantization: Any = quantization_hooks
_power_sgd: Any = powerSGD_hook
# ruff: noqa: SLF001 - the hooks' computations have no public names


def cast(dtype: torch.dtype) -> Callable[[Tensor], None]:
    """Return the computation of ``fp16_compress_hook`` or ``bf16_compress_hook``."""

    def run(tensor: Tensor) -> None:
        tensor.copy_(tensor.to(dtype))

    return run


def int8_per_tensor(tensor: Tensor) -> None:
    """Quantize and dequantize as ``quantization_pertensor_hook``."""
    observer: Any = torch.ao.quantization.MinMaxObserver()
    observer(tensor)
    scale, zero = observer.calculate_qparams()
    codes = _quantization._quantize_per_tensor_backend(tensor, scale, zero)
    _quantization._dequantize_per_tensor_backend(codes, scale, zero)


def int8_per_channel(tensor: Tensor) -> None:
    """Quantize and dequantize as ``quantization_perchannel_hook``."""
    channels = tensor.view(-1, CHANNEL)
    observer: Any = torch.ao.quantization.PerChannelMinMaxObserver()
    observer(channels)
    scale, zero = observer.calculate_qparams()
    codes = _quantization._quantize_per_channel_backend(channels, scale, zero)
    _quantization._dequantize_per_channel_backend(codes, scale, zero)


def power_sgd(rank: int) -> Callable[[Tensor], None]:
    """Return the computation of ``powerSGD_hook`` with warm start, without error feedback."""
    left, right = torch.empty(1, SIDE, rank), torch.randn(1, SIDE, rank)

    def run(tensor: Tensor) -> None:
        matrix = tensor.view(1, SIDE, SIDE)
        _power_sgd._orthogonalize(right)
        torch.bmm(matrix, right, out=left)
        _power_sgd._orthogonalize(left)
        torch.bmm(matrix.transpose(1, 2), left, out=right)
        torch.bmm(left, right.transpose(1, 2), out=matrix)

    return run


def top_k(spec: TopKSpec) -> Callable[[Tensor], None]:
    """Return a selection by ``torch.topk``, with indices of 64 bits and values of 32 bits."""

    def run(tensor: Tensor) -> None:
        chunks = tensor.view(-1, spec.chunk)
        indices = chunks.abs().topk(spec.kept(spec.chunk), dim=1, sorted=False).indices
        values = chunks.gather(1, indices)
        torch.zeros_like(chunks).scatter_(1, indices, values)

    return run


def cases() -> list[tuple[str, CompressionSpec, str, Callable[[Tensor], None]]]:
    """Return (name, codec, name of the peer, computation of the peer)."""
    plain: dict[str, Any] = {"error_feedback": None}
    nearest = "quantization_pertensor_hook (int8; torch has no such hook)"
    loco = SPARSE_LOCO.model_copy(update=plain)
    return [
        ("bf16", QuantizationSpec(name="bf16", **plain), "bf16_compress_hook", cast(torch.bfloat16)),
        ("bf16", QuantizationSpec(name="bf16", **plain), "fp16_compress_hook", cast(torch.float16)),
        ("int8", QuantizationSpec(name="int8", **plain), "quantization_pertensor_hook", int8_per_tensor),
        ("int8", QuantizationSpec(name="int8", **plain), "quantization_perchannel_hook", int8_per_channel),
        ("int4", QuantizationSpec(name="int4", **plain), nearest, int8_per_tensor),
        ("int2", QuantizationSpec(name="int2", **plain), nearest, int8_per_tensor),
        ("sign", QuantizationSpec(name="sign", **plain), nearest, int8_per_tensor),
        ("topk, SparseLoCo", loco, "torch.topk (torch has no such hook)", top_k(loco)),
        ("powersgd, rank 1", PowerSgdSpec(rank=1, **plain), "powerSGD_hook", power_sgd(1)),
        ("powersgd, rank 4", PowerSgdSpec(rank=4, **plain), "powerSGD_hook", power_sgd(4)),
        ("powersgd, rank 16", PowerSgdSpec(rank=16, **plain), "powerSGD_hook", power_sgd(16)),
    ]


def measure(codec: Codec, peer: Callable[[Tensor], None], turns: int) -> tuple[list[float], list[float]]:
    """Let both sides take turns; return the GB/s of each turn, first of the codec."""
    tensor = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    state: State = codec.begin("weight", tensor.shape)
    decoded = tensor.clone()
    own: list[float] = []
    other: list[float] = []
    for turn in range(turns + 1):
        _, own_ms = timed(lambda: codec.decode(codec.encode(tensor, state)[0], tensor.shape, decoded))
        decoded.copy_(tensor)  # the hooks overwrite their tensor
        _, other_ms = timed(lambda: peer(decoded))
        if turn:  # the first turn is warm-up
            own.append(tensor.nbytes / own_ms / 1e6)
            other.append(tensor.nbytes / other_ms / 1e6)
    return own, other


def message_bytes(codec: BoundaryCodec) -> int:
    """Return the bytes of the message with an activation of 4 samples of 512 tokens, in a model of hidden size 256."""
    activation = torch.randn(4, 512, 256, generator=torch.Generator().manual_seed(0))
    sent = encoded(activation, codec)
    content = sent.reshape(-1).view(torch.uint8).numpy().data
    dtype, shape = str(sent.dtype).removeprefix("torch."), tuple(sent.shape)
    label = WireLabel("train", 1, "activation", 0, 0)
    return len(Envelope("job-0123456789", 1, label, dtype, shape, "machine-0", 1).pack(content)) + len(
        content
    )


def print_boundary_bytes() -> None:
    """Print the bytes of compressed activations."""
    plain = message_bytes("none")
    goals: dict[BoundaryCodec, float] = {"bf16": 0.51, "int8": 0.26}
    for codec, goal in goals.items():
        compressed = message_bytes(codec)
        print_figure(
            "boundary_bytes",
            ours=compressed / plain,
            peer=goal,
            peer_name="goal: most bytes, as a fraction of float32",
            ratio=goal * plain / compressed,
            unit="of the bytes in float32",
            codec=codec,
            message_bytes=compressed,
            float32_bytes=plain,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smoke run: two turns")
    parser.add_argument("--turns", type=int, default=25, help="turns of each side")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print_boundary_bytes()
    for name, spec, peer_name, peer in cases():
        codec = codec_of(spec, 0)
        own, other = measure(codec, peer, 2 if options.quick else options.turns)
        print_figure(
            "encode_decode",
            ours=statistics.median(own),
            peer=statistics.median(other),
            peer_name=peer_name,
            ratio=statistics.median(a / b for a, b in zip(own, other, strict=True)),
            unit="GB/s",
            codec=name,
            values=SIDE * SIDE,
            bytes_ratio=round(4 * SIDE * SIDE / codec.num_bytes((SIDE, SIDE)), 2),
            goal_ratio=GOAL,
        )


if __name__ == "__main__":
    main()
