"""Rows of data with the keys that they touch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from share_compute.sparse.keys import BIAS, Places, cuts, digest_of, places_of

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RawRows:
    """Rows as a reader returns them: row i has the entries from ``starts[i]`` to ``starts[i+1]``."""

    starts: NDArray[np.int64]
    keys: NDArray[np.uint64]
    values: NDArray[np.float64]
    targets: NDArray[np.float64]
    """Target of each row; zeros if the data has none."""
    is_second: NDArray[np.bool_] | None = None
    """Whether each entry's key is of the second kind, such as items beside users."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def part(self, rows: slice | NDArray[np.int64]) -> RawRows:
        """Return some of the rows."""
        chosen = np.arange(len(self))[rows]
        counts = np.diff(self.starts)[chosen]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        entries = np.arange(starts[-1]) + np.repeat(self.starts[:-1][chosen] - starts[:-1], counts)
        is_second = None if self.is_second is None else self.is_second[entries]
        return RawRows(starts, self.keys[entries], self.values[entries], self.targets[chosen], is_second)


def joined(parts: Sequence[RawRows]) -> RawRows:
    """Return the rows of several parts as one."""
    if len(parts) == 1:
        return parts[0]
    ends = np.cumsum([0, *(int(part.starts[-1]) for part in parts)])
    starts = [part.starts[1:] + end for part, end in zip(parts, ends[:-1], strict=True)]
    seconds = [part.is_second for part in parts if part.is_second is not None]
    return RawRows(
        np.concatenate([np.zeros(1, np.int64), *starts]),
        np.concatenate([part.keys for part in parts]),
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.targets for part in parts]),
        np.concatenate(seconds) if len(seconds) == len(parts) else None,
    )


@dataclass(frozen=True, slots=True)
class Block:
    """A minibatch: a sparse matrix whose columns are the places that it touches, in the order of places."""

    places: Places
    """Touched places, sorted; with a bias, its place is among them."""
    matrix: sparse.csr_array
    """Values, ``[rows, places]``."""
    targets: Floats
    """Targets, ``[rows]``."""
    bias: int = -1
    """Column of the bias, which has no entries in the matrix; -1 if there is none."""
    counts: Floats = field(init=False)
    """Number of rows that touch each place."""

    def __post_init__(self) -> None:
        counts = np.bincount(self.matrix.indices, minlength=len(self.places)).astype(np.float32)
        if self.bias >= 0:
            counts[self.bias] = self.rows
        object.__setattr__(self, "counts", counts)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.matrix.shape[0])

    @property
    def transposed(self) -> sparse.csc_array:
        """Values ``[places, rows]``, sharing the arrays of the matrix: products with a copy by rows are slower."""
        return self.matrix.T


def entry_places(rows: RawRows) -> Places:
    """Return the place of each entry.

    Raises:
        UserError: a key is too large.
    """
    places = places_of(rows.keys)
    if rows.is_second is not None:
        places[rows.is_second] = places_of(rows.keys[rows.is_second], is_second=True)
    return places


def block_of(rows: RawRows, *, with_bias: bool = False) -> Block:
    """Convert rows to a block.

    Raises:
        UserError: a key is too large.
    """
    places = entry_places(rows)
    if with_bias:
        places = np.append(places, np.uint64(BIAS))
    touched, columns = np.unique(places, return_inverse=True)
    bias = -1
    if with_bias:
        bias, columns = int(columns[-1]), columns[:-1]
    matrix = sparse.csr_array(
        (rows.values.astype(np.float32), columns.astype(np.int32), rows.starts.astype(np.int32)),
        shape=(len(rows), len(touched)),
    )
    matrix.sort_indices()
    return Block(touched, matrix, rows.targets.astype(np.float32), bias)


@dataclass(frozen=True, slots=True)
class RangeCut:
    """Parts of a block's places in each range, with their digests."""

    slices: tuple[slice, ...]
    digests: tuple[str, ...]


def cut_of(places: Places, ranges: int) -> RangeCut:
    """Return the cut of sorted places into ranges."""
    ends = cuts(places, ranges)
    slices = tuple(slice(start, stop) for start, stop in pairwise(ends))
    return RangeCut(slices, tuple(digest_of(places[part]) for part in slices))
