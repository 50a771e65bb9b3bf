"""Packs small unsigned integers (codes) into bytes without gaps, and reads numbers of other types as bytes.

Code ``i`` of width ``bits`` takes the bits from ``i * bits`` on, counted from the lowest bit of the first byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

MOST_BITS = 16
"""Largest width of a code."""


def packed_bytes(count: int, bits: int) -> int:
    """Return the number of bytes that ``count`` codes of this width take."""
    return (count * bits + 7) // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes as bytes.

    Args:
        codes: integers from 0 to ``2**bits - 1``, of any shape; uint8, or int32 if ``bits`` is more than 8.
        bits: width of a code, from 0 to `MOST_BITS`.
    """
    codes = codes.reshape(-1)
    if bits == 8:
        return codes
    if bits == 4:
        pairs = _padded(codes, 2).view(torch.int16)
        return (pairs | pairs >> 4).to(torch.uint8)
    if bits == 1:
        return torch.from_numpy(np.packbits(codes.numpy(), bitorder="little"))
    places, width = _group(bits)
    columns = _padded(codes, places).view(-1, places)
    packed = torch.zeros(len(columns), width, dtype=torch.uint8)
    for place, byte, shift in _overlaps(bits):
        column = columns[:, place]
        packed[:, byte] |= (column << shift if shift >= 0 else column >> -shift).to(torch.uint8)
    return packed.view(-1)[: packed_bytes(codes.numel(), bits)]


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the ``count`` codes that `pack` wrote, as one row; uint8, or int32 if ``bits`` is more than 8."""
    if bits == 8:
        return packed[:count]
    if bits == 4:
        pairs = packed.to(torch.int16)
        return (pairs | pairs << 4).bitwise_and_(0x0F0F).view(torch.uint8)[:count]
    if bits == 1:
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=count, bitorder="little"))
    places, width = _group(bits)
    dtype = torch.uint8 if bits <= 8 else torch.int32
    columns = _padded(packed, max(width, 1)).view(-(-count // places), width)
    codes = torch.zeros(len(columns), places, dtype=dtype)
    for place, byte, shift in _overlaps(bits):
        column = columns[:, byte].to(dtype)
        codes[:, place] |= column >> shift if shift >= 0 else column << -shift
    return codes.bitwise_and_(2**bits - 1).view(-1)[:count]


def as_bytes(values: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor as one row."""
    return values.reshape(-1).view(torch.uint8)


def from_bytes(content: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that bytes hold; a view of the bytes if they are aligned in memory."""
    if content.storage_offset() % dtype.itemsize or content.data_ptr() % dtype.itemsize:
        content = content.clone()
    return content.view(dtype)


def _group(bits: int) -> tuple[int, int]:
    """Return the least number of codes that fill whole bytes, and the number of these bytes."""
    places = 8 // gcd(8, bits)
    return places, places * bits // 8


def _overlaps(bits: int) -> Iterator[tuple[int, int, int]]:
    """Yield (code, byte, position of the code's lowest bit in the byte) for all overlaps in a group.

    The position is negative if the code begins in an earlier byte.
    """
    for place in range(_group(bits)[0]):
        first = place * bits
        for byte in range(first // 8, -(-(first + bits) // 8)):
            yield place, byte, first - 8 * byte


def _padded(values: Tensor, multiple: int) -> Tensor:
    missing = -len(values) % multiple
    return pad(values, (0, missing)) if missing else values.contiguous()
