"""Codecs that encode a tensor row by row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from share_compute.compression.checks import require_length, require_output
from share_compute.compression.codec import Codec, State, flattened

SLAB: Final = 2**19
"""Number of values that are encoded at a time, so that intermediate results stay in caches. It is a part of the format
of payloads."""
_GROUP: Final = 4096


class RowCodec(Codec):
    """A codec without state that encodes rows of values, each row separately.

    A tensor is flattened and cut into rows of `length` values. The last row may be shorter. Slabs of many rows are
    encoded one after the other, and the payload is the concatenation of their bytes.
    """

    length: int
    """Number of values in a row."""

    @abstractmethod
    def row_bytes(self, rows: int, length: int) -> int:
        """Return the number of bytes of ``rows`` rows of ``length`` values that are encoded together."""

    @abstractmethod
    def encode_rows(self, rows: Tensor, content: Tensor, spare: Tensor) -> None:
        """Write float32 values ``[rows, length]`` as bytes to ``content``, uint8 ``[row_bytes]``; see `encode`.

        ``spare`` is memory of the size of ``rows`` for intermediate results. New memory for each slab would be slow.
        """

    @abstractmethod
    def decode_rows(self, content: Tensor, rows: Tensor) -> None:
        """Write the values that bytes ``[row_bytes]`` hold to ``rows``, float32 ``[rows, length]``; see `decode`."""

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Return the size of the payload; see `Codec.num_bytes`."""
        return sum(slabs * self.row_bytes(rows, length) for slabs, rows, length in self._layout(prod(shape)))

    def encode(self, tensor: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the payload and the same state; see `Codec.encode`."""
        values = flattened(tensor)
        payload = torch.empty(self.num_bytes(tensor.shape), dtype=torch.uint8)
        for _ in self._encoded_slabs(values, payload):
            pass
        return payload, state

    def extract(self, total: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the payload and the same state, and subtract the decoded values in place; see `Codec.extract`."""
        payload = torch.empty(self.num_bytes(total.shape), dtype=torch.uint8)
        for slab, content, spare in self._encoded_slabs(total.view(-1), payload):
            self.decode_rows(content, spare)
            slab.sub_(spare)
        return payload, state

    def decode(self, payload: Tensor, shape: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Return the tensor that a payload holds; see `Codec.decode`."""
        require_length(payload, self.num_bytes(shape))
        out = require_output(shape, out)
        values = out.view(-1)
        for first, start, rows, length in self._slabs(len(values)):
            slab = values[first : first + rows * length].view(rows, length)
            self.decode_rows(payload[start : start + self.row_bytes(rows, length)], slab)
        return out

    def _encoded_slabs(self, values: Tensor, payload: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Encode values slab by slab; yield (values, bytes, spare memory) of each slab that is encoded."""
        spare = torch.empty(min(len(values), max(SLAB, self.length)))
        for first, start, rows, length in self._slabs(len(values)):
            slab = values[first : first + rows * length].float().view(rows, length)
            content = payload[start : start + self.row_bytes(rows, length)]
            own_spare = spare[: rows * length].view(rows, length)
            self.encode_rows(slab, content, own_spare)
            yield slab, content, own_spare

    def _layout(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield (number of slabs, rows in each, values in a row) for ``size`` values, in order."""
        rows, rest = divmod(size, self.length)
        most = max(1, SLAB // self.length)
        for slabs, slab_rows in ((rows // most, most), (1, rows % most)):
            if slabs and slab_rows:
                yield slabs, slab_rows, self.length
        if rest:
            yield 1, 1, rest

    def _slabs(self, size: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (index of the first value, index of the first byte, rows, values in a row) of each slab."""
        first = start = 0
        for slabs, rows, length in self._layout(size):
            for _ in range(slabs):
                yield first, start, rows, length
                first += rows * length
                start += self.row_bytes(rows, length)


def row_sums(rows: Tensor) -> Tensor:
    """Return the sum of each row of ``[rows, length]``; its bits do not depend on the number of threads.

    PyTorch divides a sum among threads if it is the only one, and has at least 2**15 summands.
    """
    count, length = rows.shape
    groups = -(-length // _GROUP)
    if groups <= 1:
        return rows.sum(1)
    return pad(rows, (0, groups * _GROUP - length)).view(count, groups, _GROUP).sum(2).sum(1)
