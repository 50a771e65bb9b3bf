"""Codecs that send each value with fewer bits: bf16, int8, int4, two magnitudes (int2), sign.

All but bf16 send one or two scales for each row, as bfloat16, before the codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from share_compute.compression.checks import (
    LARGEST,
    damaged,
    require_decodable,
    require_encodable,
    too_large,
)
from share_compute.compression.packing import as_bytes, from_bytes, pack, packed_bytes, unpack
from share_compute.compression.rows import RowCodec, row_sums
from share_compute.models.numbers import is_finite

BLOCK: Final = 256
"""Number of values that share a scale."""
_SCALE_BYTES: Final = 2
_LARGEST_MEAN: Final = LARGEST * (1 + 2.0**-7)
"""Largest mean of magnitudes in a payload: sums round, and so does the conversion to bfloat16."""


@dataclass(frozen=True, slots=True)
class FloatCodec(RowCodec):
    """Sends values as float32, or rounds them to bfloat16.

    The error of bfloat16 is at most 2**-8 of the value's magnitude, or 2**-134 for tiny values.
    """

    dtype: torch.dtype = torch.float32
    """torch.float32 or torch.bfloat16."""
    length: int = BLOCK

    def row_bytes(self, rows: int, length: int) -> int:
        """Return the number of bytes of some rows; see `RowCodec.row_bytes`."""
        return rows * length * self.dtype.itemsize

    def encode_rows(self, rows: Tensor, content: Tensor, spare: Tensor) -> None:  # noqa: ARG002
        """Write rows as bytes; see `RowCodec.encode_rows`."""
        values = from_bytes(content, self.dtype).copy_(rows.view(-1))
        if not _is_finite(values):
            raise too_large()
        if values.data_ptr() != content.data_ptr():
            content.copy_(as_bytes(values))

    def decode_rows(self, content: Tensor, rows: Tensor) -> None:
        """Write the rows that bytes hold; see `RowCodec.decode_rows`."""
        values = from_bytes(content, self.dtype)
        if not _is_finite(values):
            raise damaged("a value is not finite")
        rows.copy_(values.view_as(rows))


@dataclass(frozen=True, slots=True)
class IntegerCodec(RowCodec):
    """Rounds values to multiples of a scale: symmetric quantization to integers, one scale for each row.

    The scale is the row's largest magnitude divided by the largest integer (127 or 7), rounded up to bfloat16. The
    error is at most half the scale.
    """

    bits: int
    """8 or 4."""
    length: int = BLOCK

    def row_bytes(self, rows: int, length: int) -> int:
        """Return the number of bytes of some rows; see `RowCodec.row_bytes`."""
        return rows * _SCALE_BYTES + packed_bytes(rows * length, self.bits)

    def encode_rows(self, rows: Tensor, content: Tensor, spare: Tensor) -> None:
        """Write rows as bytes; see `RowCodec.encode_rows`."""
        largest = torch.maximum(rows.amax(1), -rows.amin(1))
        require_encodable(largest)
        scales = _rounded_up(largest / self._largest)
        integers = torch.div(rows, scales.float()[:, None], out=spare).round_().to(torch.int8)
        if self.bits == 4:
            integers += self._offset
        torch.cat((as_bytes(scales), pack(integers.view(torch.uint8), self.bits)), out=content)

    def decode_rows(self, content: Tensor, rows: Tensor) -> None:
        """Write the rows that bytes hold; see `RowCodec.decode_rows`."""
        scales, codes = _split(content, len(rows), LARGEST / self._largest * (1 + 2.0**-7))
        integers = unpack(codes, self.bits, rows.numel()).view(torch.int8)
        if self.bits == 4:
            integers = integers - self._offset
        rows.copy_(integers.view_as(rows)).mul_(scales[:, None])

    @property
    def _largest(self) -> int:
        return (1 << self.bits - 1) - 1

    @property
    def _offset(self) -> int:
        return 1 << self.bits - 1


@dataclass(frozen=True, slots=True)
class TwoMagnitudesCodec(RowCodec):
    """Sends two bits for each value: its sign, and one of two magnitudes, which are chosen for each row.

    A magnitude is large if it is more than the row's mean magnitude. The codec sends the mean of the small magnitudes
    and the mean of the large ones, so the sum of squared errors is at most the sum of squares.

    Source: SparseLoCo quantizes to four levels, each the mean of the values in its bin (``TopKCompressor`` of
    github.com/one-covenant/templar, after the uniform quantization of hivemind). Its bins have equal widths around the
    mean of a whole tensor. The bins here are symmetric and fitted to each row, because the largest values of a chunk
    are never near 0.
    """

    length: int = BLOCK

    def row_bytes(self, rows: int, length: int) -> int:
        """Return the number of bytes of some rows; see `RowCodec.row_bytes`."""
        return 2 * (rows * _SCALE_BYTES + packed_bytes(rows * length, 1))

    def encode_rows(self, rows: Tensor, content: Tensor, spare: Tensor) -> None:
        """Write rows as bytes; see `RowCodec.encode_rows`."""
        length = rows.shape[1]
        magnitudes = torch.abs(rows, out=spare)
        sums = row_sums(magnitudes)
        means = sums / length
        require_encodable(means)
        excess = magnitudes.sub_(means[:, None])
        large = torch.from_numpy(excess.numpy() > 0)
        counts = large.view(torch.uint8).sum(1, dtype=torch.int32)
        large_sums = row_sums(excess.clamp_(min=0)) + counts * means
        small_means = (sums - large_sums).clamp_(min=0) / (length - counts).clamp_(min=1)
        scales = torch.cat((small_means, large_sums / counts.clamp(min=1))).bfloat16()
        torch.cat((as_bytes(scales), _negatives(rows), pack(large, 1)), out=content)

    def decode_rows(self, content: Tensor, rows: Tensor) -> None:
        """Write the rows that bytes hold; see `RowCodec.decode_rows`."""
        scales, codes = _split(content, 2 * len(rows), _LARGEST_MEAN)
        small, large = scales.view(2, -1, 1)
        negative, is_large = (unpack(plane, 1, rows.numel()).view_as(rows) for plane in codes.chunk(2))
        rows.copy_(is_large).mul_(large - small).add_(small).mul_(1 - 2 * negative.view(torch.int8))


@dataclass(frozen=True, slots=True)
class SignCodec(RowCodec):
    """Sends the sign of each value, and the mean magnitude of each row; 0 counts as positive.

    The sum of squared errors is at most the sum of squares (Karimireddy et al. 2019, arXiv 1901.09847).
    """

    length: int = BLOCK

    def row_bytes(self, rows: int, length: int) -> int:
        """Return the number of bytes of some rows; see `RowCodec.row_bytes`."""
        return rows * _SCALE_BYTES + packed_bytes(rows * length, 1)

    def encode_rows(self, rows: Tensor, content: Tensor, spare: Tensor) -> None:
        """Write rows as bytes; see `RowCodec.encode_rows`."""
        means = row_sums(torch.abs(rows, out=spare)) / rows.shape[1]
        require_encodable(means)
        torch.cat((as_bytes(means.bfloat16()), _negatives(rows)), out=content)

    def decode_rows(self, content: Tensor, rows: Tensor) -> None:
        """Write the rows that bytes hold; see `RowCodec.decode_rows`."""
        means, codes = _split(content, len(rows), _LARGEST_MEAN)
        negative = unpack(codes, 1, rows.numel()).view_as(rows)
        rows.copy_(1 - 2 * negative.view(torch.int8)).mul_(means[:, None])


def _is_finite(values: Tensor) -> bool:
    if values.dtype == torch.bfloat16:
        # Integer operations are faster. In each sign, the largest bit patterns are not finite.
        bits = values.view(torch.int16).numpy()
        return bool(bits.max() < 0x7F80 and bits.view(np.uint16).max() < 0xFF80)
    return is_finite(values)


def _rounded_up(scales: Tensor) -> Tensor:
    """Return, for each scale, the least bfloat16 that is not less and has a finite reciprocal."""
    bits = scales.clamp(min=torch.finfo(torch.float32).tiny).view(torch.int32)
    return ((bits + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


def _split(content: Tensor, count: int, largest: float) -> tuple[Tensor, Tensor]:
    """Split bytes into the ``count`` scales at their start and the rest; scales are float32, at most ``largest``."""
    scales = from_bytes(content[: count * _SCALE_BYTES], torch.bfloat16).float()
    require_decodable(scales, 0.0, largest, "a scale")
    return scales, content[count * _SCALE_BYTES :]


def _negatives(rows: Tensor) -> Tensor:
    """Return one bit for each value, set if it is negative. Comparisons are several times faster in numpy."""
    return pack(torch.from_numpy(rows.numpy() < 0), 1)
