"""The codec that sends only the values of largest magnitude of each chunk (top-k sparsification)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from share_compute.compression.checks import damaged, require_encodable
from share_compute.compression.packing import pack, packed_bytes, unpack
from share_compute.compression.rows import RowCodec


@dataclass(frozen=True, slots=True)
class TopKCodec(RowCodec):
    """Sends the values of largest magnitude of each chunk, in ascending order of their indices in the chunk.

    Equal magnitudes are taken from the lowest index on. An index takes ``ceil(log2(chunk))`` bits. The sum of squared
    errors is at most ``1 - density`` of the sum of squares, apart from the error of the values' own codec.

    Sources: Deep Gradient Compression (Lin et al. 2018, arXiv 1712.01887); chunks as in DeMo (arXiv 2411.19870) and
    SparseLoCo (arXiv 2508.15706).
    """

    density: float
    """Fraction of the values that are sent, rounded to a whole number for each chunk, and at least one."""
    length: int
    """Number of values in a chunk; at most 2**14."""
    values: RowCodec
    """Codec of the values that are sent; the values of one chunk are a row."""

    def row_bytes(self, rows: int, length: int) -> int:
        """Return the number of bytes of some chunks; see `RowCodec.row_bytes`."""
        kept = self._kept(length)
        return packed_bytes(rows * kept, _index_bits(length)) + self.values.row_bytes(rows, kept)

    def encode_rows(self, rows: Tensor, content: Tensor, spare: Tensor) -> None:
        """Write chunks as bytes; see `RowCodec.encode_rows`."""
        length = rows.shape[1]
        kept, bits = self._kept(length), _index_bits(length)
        indices = _largest(torch.abs(rows, out=spare), kept)
        edge = packed_bytes(len(rows) * kept, bits)
        content[:edge] = pack(indices.to(torch.int32 if bits > 8 else torch.uint8), bits)
        values = rows.gather(1, indices)
        self.values.encode_rows(values, content[edge:], torch.empty_like(values))

    def decode_rows(self, content: Tensor, rows: Tensor) -> None:
        """Write the chunks that bytes hold; see `RowCodec.decode_rows`."""
        count, length = rows.shape
        kept, bits = self._kept(length), _index_bits(length)
        edge = packed_bytes(count * kept, bits)
        indices = unpack(content[:edge], bits, count * kept).view(count, kept).long()
        if not bool((indices[:, 1:] > indices[:, :-1]).all()) or not bool((indices[:, -1] < length).all()):
            raise damaged(f"the indices in a chunk of {length} values do not ascend")
        values = torch.empty(count, kept)
        self.values.decode_rows(content[edge:], values)
        rows.zero_().scatter_(1, indices, values)

    def _kept(self, length: int) -> int:
        return max(1, round(self.density * length))


def _index_bits(length: int) -> int:
    return (length - 1).bit_length()


def _largest(magnitudes: Tensor, kept: int) -> Tensor:
    """Return the indices of the ``kept`` largest magnitudes of each row, ascending, int64 ``[rows, kept]``.

    Equal magnitudes are taken from the lowest index on.

    A full selection is slow, so a few candidates are found first. Each row is divided into at least four times as many
    groups as values are kept. The ``kept``-th largest of the groups' maxima is a bound: at least ``kept`` values of the
    row reach it. The values that reach it are the candidates.
    """
    rows, length = magnitudes.shape
    size = 1
    while length % (2 * size) == 0 and length // (2 * size) >= 4 * kept:
        size *= 2
    heads = magnitudes.view(rows, size, -1).amax(1)
    require_encodable(heads)
    numbers = magnitudes.numpy()
    least = np.partition(heads.numpy(), heads.shape[1] - kept, axis=1)[:, heads.shape[1] - kept, None]
    is_candidate = numbers >= least
    if not least.all():  # a row with fewer than `kept` numbers other than 0 takes its first zeros
        is_candidate[:, 2 * kept :] &= numbers[:, 2 * kept :] > 0
    found = np.flatnonzero(is_candidate)

    # One row of candidates for each row: indices in ascending order, padded with -1.
    row = found // length
    counts = np.bincount(row, minlength=rows)
    place = np.arange(len(found)) - np.repeat(np.cumsum(counts) - counts, counts)
    values = np.full((rows, counts.max()), -1, np.float32)
    values[row, place] = numbers.reshape(-1)[found]
    least = np.partition(values, values.shape[1] - kept, axis=1)[:, values.shape[1] - kept, None]
    above, equal = values > least, values == least
    equal &= np.cumsum(equal, axis=1) <= kept - above.sum(1, keepdims=True)
    chosen = (above | equal)[row, place]
    return torch.from_numpy(found[chosen] % length).view(rows, kept)
