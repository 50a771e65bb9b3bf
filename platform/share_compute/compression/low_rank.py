"""The codec that sends a matrix as a product of two matrices of low rank (PowerSGD)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from torch import Tensor

from share_compute.compression.checks import (
    LARGEST,
    require_decodable,
    require_encodable,
    require_length,
    require_output,
    require_state,
)
from share_compute.compression.codec import Codec, State, flattened
from share_compute.compression.packing import as_bytes, from_bytes
from share_compute.compression.quantization import FloatCodec
from share_compute.compression.rows import SLAB, row_sums
from share_compute.models.cells import derive_seed

_PLAIN: Final = FloatCodec()
_RIGHT: Final = "right"
_LEAST_SAVING: Final = 2
"""Least ratio of bytes before and after, as ``min_compression_rate`` of PyTorch's PowerSGD hook."""
_LARGEST_RIGHT: Final = LARGEST * 2.0**16
"""Largest magnitude of a value of Q. Products of P and Q are finite with it."""
_DEPENDENT: Final = 1e-6
"""A vector is dropped as linearly dependent if less than this fraction of its length remains."""
_FLOAT64_BITS: Final = 53
_FLOAT32_BITS: Final = 24
"""Significant bits of the two types."""
_BITS: Final = 22
"""Bits of a value of the matrix, and of P, in a product."""
_ROWS: Final = 2 ** (_FLOAT64_BITS - 2 * _BITS)
"""Number of products of two such values whose sum is exact in float64."""


@dataclass(frozen=True, slots=True)
class PowerSgdCodec(Codec):
    """Sends a matrix M as the product P Q: P has orthogonal columns, and P Q is the projection of M on their span.

    P spans the product of M and the last Q (one step of subspace iteration). The first Q is drawn from the seed and the
    parameter's name. The sum of squared errors is at most the sum of squares. If the rank of M is at most ``rank``, P Q
    is M.

    A tensor of more dimensions is reshaped to a matrix: its first dimension by all others. Tensors with less than two
    dimensions are sent as float32, and so are matrices if the product saves less than half the bytes.

    The order in which a matrix product adds depends on the library, the number of threads, and the place of tensors in
    memory. So factors are rounded to few bits. Then all sums of products are exact in float64, and their order does not
    matter. The sums of different rows of M are added in a fixed order.

    Sources: Vogels et al. 2019, arXiv 1905.13727; exact sums: Ozaki et al. 2012, doi 10.1007/s11075-011-9478-1.
    """

    rank: int
    """Number of columns of P, and of rows of Q; at most 1,024."""
    seed: int = 0
    """Seed of the first Q."""

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Return the size of the payload; see `Codec.num_bytes`."""
        size = self._matrix(shape)
        return sum(size) * self.rank * 4 if size else _PLAIN.num_bytes(shape)

    def begin(self, name: str, shape: Sequence[int]) -> State:
        """Return the first Q; see `Codec.begin`."""
        size = self._matrix(shape)
        if size is None:
            return {}
        source = torch.Generator().manual_seed(derive_seed(self.seed, "powersgd", name))
        return {_RIGHT: torch.randn(self.rank, size[1], generator=source)}

    def encode(self, tensor: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the payload, and the state with the next Q; see `Codec.encode`."""
        size = self._matrix(tensor.shape)
        if size is None:
            return _PLAIN.encode(tensor, state)
        rows, columns = size
        matrix = flattened(tensor).float().view(size)
        last = require_state(state, _RIGHT, (self.rank, columns)).double()
        low, high = torch.aminmax(matrix)
        largest = torch.maximum(-low, high)
        require_encodable(largest)

        # P and Q are transposed: vectors are rows.
        guess = _rounded(last / _power_above(last), min(_BITS, _FLOAT64_BITS - _BITS - columns.bit_length()))
        spare = torch.empty(_slab_rows(*size), columns, dtype=torch.float64)
        left = torch.empty(self.rank, rows, dtype=torch.float64)
        for part, slab in _rounded_slabs(matrix, largest, spare):
            torch.mm(guess, slab.T, out=left[:, part])
        left = _orthonormal(left)
        power = _power_above(left)
        left = _rounded(left / power, _BITS)
        right = torch.zeros(self.rank, columns, dtype=torch.float64)
        for part, slab in _rounded_slabs(matrix, largest, spare):
            right += left[:, part] @ slab
        right *= power.square()

        # A vector that is 0 would stay 0 forever, so the last vector replaces it.
        following = torch.where(right.any(1, keepdim=True), right / _power_above(right), last)
        whole = _power_above(right.view(1, -1))
        right = _rounded(right / whole, _FLOAT64_BITS - _BITS - self.rank.bit_length()) * whole
        return torch.cat((as_bytes(left.float()), as_bytes(right.float()))), {_RIGHT: following.float()}

    def decode(self, payload: Tensor, shape: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Return the tensor that a payload holds; see `Codec.decode`."""
        size = self._matrix(shape)
        if size is None:
            return _PLAIN.decode(payload, shape, out)
        require_length(payload, self.num_bytes(shape))
        left, right = torch.split(from_bytes(payload, torch.float32), [self.rank * side for side in size])
        require_decodable(left, -1.0, 1.0, "a value of P")
        require_decodable(right, -_LARGEST_RIGHT, _LARGEST_RIGHT, "a value of Q")
        out = require_output(shape, out)
        matrix = out.view(size)
        if self.rank == 1:
            torch.mul(left[:, None], right, out=matrix)  # rounded once, as products in float64 are
            return out
        columns, vectors = left.view(self.rank, size[0]).double().T, right.view(self.rank, size[1]).double()
        spare = torch.empty(_slab_rows(*size), size[1], dtype=torch.float64)
        for part in _slabs(*size):
            matrix[part] = torch.mm(columns[part], vectors, out=spare[: part.stop - part.start])
        return out

    def _matrix(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return the rows and columns of a tensor that is sent as a product; None for other tensors."""
        if len(shape) < 2 or not prod(shape):
            return None
        rows, columns = shape[0], prod(shape[1:])
        saves = (rows + columns) * self.rank * _LEAST_SAVING < rows * columns
        return (rows, columns) if saves else None


def _slabs(rows: int, columns: int) -> Iterator[slice]:
    """Yield groups of rows of a matrix, each small enough for a core's cache."""
    most = _slab_rows(rows, columns)
    for start in range(0, rows, most):
        yield slice(start, min(start + most, rows))


def _slab_rows(rows: int, columns: int) -> int:
    return max(1, min(rows, _ROWS, SLAB // columns))


def _rounded_slabs(matrix: Tensor, largest: Tensor, spare: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield groups of rows, and their float32 values rounded to `_BITS` bits below the power of two above ``largest``.

    The values are float64 in ``spare``; the next group overwrites them.
    """
    # Near this number, adjacent float32 numbers differ by the unit.
    shift = 1.5 * float(_next_power(largest)) * 2.0 ** (_FLOAT32_BITS - 1 - _BITS)
    narrow = torch.empty(spare.shape)
    for part in _slabs(*matrix.shape):
        count = part.stop - part.start
        rounded = torch.add(matrix[part], shift, out=narrow[:count]).sub_(shift)
        yield part, spare[:count].copy_(rounded)


def _power_above(vectors: Tensor) -> Tensor:
    """Return the least power of two above all magnitudes of each row, ``[rows, 1]``; 1 for zeros."""
    return _next_power(vectors.abs().amax(1, keepdim=True))


def _next_power(magnitudes: Tensor) -> Tensor:
    """Return the least power of two above each magnitude; 1 for 0."""
    return torch.where(magnitudes > 0, magnitudes / torch.frexp(magnitudes).mantissa, 1)


def _rounded(values: Tensor, bits: int) -> Tensor:
    """Round float64 values of magnitude at most 1 to multiples of ``2**-bits``."""
    # Near this number, adjacent float64 numbers differ by 2**-bits.
    shift = 1.5 * 2.0 ** (_FLOAT64_BITS - 1 - bits)
    return (values + shift).sub_(shift)


def _orthonormal(vectors: Tensor) -> Tensor:
    """Return an orthonormal basis of the span of vectors ``[count, size]``; vectors that depend on others become 0.

    Modified Gram-Schmidt, in float64.
    """
    vectors = vectors / _power_above(vectors)  # squares of large values would overflow
    lengths = row_sums(vectors.square()).sqrt_()
    for place in range(len(vectors)):
        vector, others = vectors[place], vectors[place + 1 :]
        length = row_sums(vector.square()[None]).sqrt_()
        vector.mul_(torch.where(length > _DEPENDENT * lengths[place], 1 / length, 0))
        others -= row_sums(others * vector)[:, None] * vector
    return vectors
