"""The rows of one worker as minibatches, and the updates that the worker computes from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from share_compute.errors import VerificationFailed
from share_compute.sparse.blocks import Block, Floats, RangeCut, RawRows, block_of, cut_of, joined
from share_compute.sparse.models import SparseModel, Totals
from share_compute.sparse.table import RowValues


def minibatches_of(rows: RawRows, size: int, seed: int, *, with_bias: bool = False) -> list[Block]:
    """Return rows as minibatches of ``size`` rows, in an order that is drawn once.

    The minibatches are the same in each pass, so that lists of keys repeat and are sent once.
    """
    return list(streamed_minibatches([rows], size, seed, with_bias=with_bias))


def streamed_minibatches(
    parts: Iterable[RawRows], size: int, seed: int, *, with_bias: bool = False
) -> Iterator[Block]:
    """Yield minibatches of ``size`` rows from parts of rows; only one part is in memory at a time.

    The rows of each part are shuffled. Rows that do not fill a minibatch are shuffled again with the next part.
    """
    rest: list[RawRows] = []
    for number, rows in enumerate(parts):
        both = joined([*rest, rows])
        both = both.part(np.random.default_rng((seed, number)).permutation(len(both)))
        whole = len(both) // size * size
        for start in range(0, whole, size):
            yield block_of(both.part(slice(start, start + size)), with_bias=with_bias)
        rest = [both.part(slice(whole, None))]
    for rows in rest:
        if len(rows):
            yield block_of(rows, with_bias=with_bias)


class WorkerRows:
    """The minibatches of a worker in the order of its clocks.

    Args:
        blocks: minibatches.
        ranges: number of ranges of places.
        passes: number of passes.
        seed: seed of the order in each pass.
        worker: number of the worker.
    """

    def __init__(self, blocks: Sequence[Block], ranges: int, passes: int, seed: int, worker: int) -> None:
        self._blocks, self._passes, self._seed, self._worker = blocks, passes, seed, worker
        self._cuts = [cut_of(block.places, ranges) for block in blocks]

    @property
    def last_clock(self) -> int:
        """Number of minibatches in all passes."""
        return len(self._blocks) * self._passes

    def number(self, clock: int) -> int:
        """Return the number of the minibatch of a clock; clocks count from 1."""
        pass_number, place = divmod(clock - 1, len(self._blocks))
        return int(_order(self._seed, self._worker, pass_number, len(self._blocks))[place])

    def block(self, clock: int) -> Block:
        """Return the minibatch of a clock."""
        return self._blocks[self.number(clock)]

    def cut(self, clock: int) -> RangeCut:
        """Return the cut of the places of a clock's minibatch into ranges."""
        return self._cuts[self.number(clock)]

    def wanted(self, clock: int, number: int) -> RowValues:
        """Return the places of a range that a clock's minibatch needs, without values."""
        block, cut = self.block(clock), self.cut(clock)
        places = block.places[cut.slices[number]]
        return RowValues(places, np.empty((len(places), 0), np.float32), cut.digests[number])

    def updates(
        self, clock: int, model: SparseModel, weights: Sequence[Floats], totals: Totals
    ) -> tuple[list[RowValues], float]:
        """Return the update of each range, and the summed loss before it.

        Args:
            clock: number of the minibatch.
            model: the model.
            weights: pulled weights of the places of each range.
            totals: sum of the weights of all rows, and their number, ``[width + 1]``.

        Raises:
            VerificationFailed: the update is not finite.
        """
        block, cut = self.block(clock), self.cut(clock)
        together = weights[0] if len(weights) == 1 else np.concatenate(weights)
        with np.errstate(over="ignore", invalid="ignore"):
            gradient, loss = model.gradient(block, together, totals)
        if not np.isfinite(gradient).all():
            raise VerificationFailed(
                f"the update of minibatch {clock} of worker {self._worker} is not finite",
                hint="scale the features, or lower training.learning_rate",
            )
        parts = [
            RowValues(block.places[part], gradient[part], digest)
            for part, digest in zip(cut.slices, cut.digests, strict=True)
        ]
        return parts, loss


@lru_cache(maxsize=4)
def _order(seed: int, worker: int, pass_number: int, count: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, 1, worker, pass_number)).permutation(count)
