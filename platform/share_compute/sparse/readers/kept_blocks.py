"""Minibatches of a worker: a bounded part is in memory, and the others are in an unnamed temporary file."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save
from scipy import sparse

from share_compute.sparse.blocks import Block

_RECENT = 4
"""Number of minibatches from the file that stay in memory: those of the pushes that are under way, and of the pull."""


class KeptBlocks(Sequence[Block]):
    """Minibatches in the order in which they were added.

    Args:
        most_bytes: size of the minibatches that stay in memory.
    """

    def __init__(self, most_bytes: int) -> None:
        self._free = most_bytes
        self._kept: dict[int, Block] = {}
        self._recent: OrderedDict[int, Block] = OrderedDict()
        self._places: list[tuple[int, int]] = []
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it is used as long as the minibatches
        self.rows = 0
        """Number of rows in all minibatches."""

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def add(self, block: Block) -> None:
        """Add a minibatch."""
        size = _size(block)
        self.rows += block.rows
        number = len(self._places)
        if size <= self._free:
            self._free -= size
            self._kept[number] = block
            self._places.append((0, 0))
        else:
            self._free = 0  # all later minibatches go to the file, too
            content = save(_arrays(block))
            self._places.append((self._file.seek(0, 2), len(content)))
            self._file.write(content)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Block]:
        return (self[number] for number in range(len(self)))

    @overload
    def __getitem__(self, number: int) -> Block: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[Block]: ...

    def __getitem__(self, number: int | slice) -> Block | Sequence[Block]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(f"there are {len(self)} minibatches")
        found = self._kept.get(number) or self._recent.get(number)
        if found is None:
            start, size = self._places[number]
            self._file.seek(start)
            found = _block(self._file.read(size))
            self._recent[number] = found
            if len(self._recent) > _RECENT:
                self._recent.popitem(last=False)
        return found


def _arrays(block: Block) -> dict[str, NDArray[np.generic]]:
    matrix = block.matrix
    return {
        "places": block.places,
        "starts": matrix.indptr,
        "columns": matrix.indices,
        "values": matrix.data,
        "targets": block.targets,
        "bias": np.array([block.bias], np.int64),
    }


def _block(content: bytes) -> Block:
    arrays = load(content)
    shape = (len(arrays["targets"]), len(arrays["places"]))
    matrix = sparse.csr_array((arrays["values"], arrays["columns"], arrays["starts"]), shape=shape)
    return Block(arrays["places"], matrix, arrays["targets"], int(arrays["bias"][0]))


def _size(block: Block) -> int:
    """Return the bytes of a minibatch in memory."""
    matrix = block.matrix
    arrays = (matrix.data, matrix.indices, matrix.indptr, block.places, block.targets, block.counts)
    return sum(int(array.nbytes) for array in arrays)
