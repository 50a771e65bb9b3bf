"""Hogwild (Niu et al. 2011): threads that update shared rows without locks.

Threads may overwrite each other's updates of a row. Sparse minibatches seldom touch the same rows, so little is lost.
The result depends on the timing of threads, so it is not reproducible.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import repeat

import numpy as np

from share_compute.errors import VerificationFailed
from share_compute.sparse.blocks import Block
from share_compute.sparse.keys import Places, Rows, bias_rows
from share_compute.sparse.minibatches import WorkerRows
from share_compute.sparse.models import NO_TOTALS, SparseModel
from share_compute.sparse.rules import RangeCounters, UpdateRule
from share_compute.sparse.table import RangeTable, TableSnapshot


class HogwildTraining:
    """Trains in this process with threads that share all rows; the threads wait for each other after each pass.

    Args:
        model: a model that needs no totals.
        rule: rule of the rows.
        blocks: minibatches, which are divided among the threads.
        threads: number of threads.
        seed: seed of the order.
        snapshot: initial rows, from an earlier training of the same blocks.

    Raises:
        ValueError: workers of the rule need totals, which threads cannot keep without locks.
        VerificationFailed: the snapshot has other places than the blocks.
    """

    def __init__(
        self,
        model: SparseModel,
        rule: UpdateRule,
        blocks: Sequence[Block],
        threads: int,
        seed: int = 0,
        snapshot: TableSnapshot | None = None,
    ) -> None:
        if rule.has_totals:
            raise ValueError("topics need the sum of all rows, which threads cannot keep without locks")
        self._model, self._rule, self._blocks, self._seed = model, rule, blocks, seed
        self._places: Places = np.unique(np.concatenate([block.places for block in blocks]))
        if snapshot is None:
            self._counters = RangeCounters()
            self._state = rule.initial(self._places, self._counters)
        elif np.array_equal(snapshot.places, self._places):
            self._counters, self._state = replace(snapshot.counters), np.array(snapshot.state)
        else:
            raise VerificationFailed("the checkpoint has other keys than the data", hint="submit a new job")
        self._biases = [bias_rows(block.places) for block in blocks]
        self._rows: list[Rows] = [np.searchsorted(self._places, block.places) for block in blocks]
        shares = (list(range(thread, len(blocks), threads)) for thread in range(threads))
        self._shares = [share for share in shares if share]

    def train(self, number: int) -> float:
        """Make one pass over all minibatches; return the mean loss, measured for each minibatch before its update.

        Args:
            number: number of the pass, from 0, on which the order of minibatches depends.
        """
        with ThreadPoolExecutor(len(self._shares)) as pool:
            losses = list(pool.map(self._work, range(len(self._shares)), repeat(number)))
        return sum(losses) / sum(block.rows for block in self._blocks)

    def _work(self, thread: int, number: int) -> float:
        """Make one pass over the minibatches of a thread; return the sum of their losses."""
        share, state, counters = self._shares[thread], self._state, self._counters
        order = WorkerRows([self._blocks[at] for at in share], 1, number + 1, self._seed, thread)
        width, numbers = self._rule.state_width, state.reshape(-1)
        columns, total = np.arange(width), 0.0
        for clock in range(number * len(share) + 1, (number + 1) * len(share) + 1):
            chosen = share[order.number(clock)]
            at, block, bias = self._rows[chosen], self._blocks[chosen], self._biases[chosen]
            weights = self._rule.weights(state[at], bias, counters)
            gradient, loss = self._model.gradient(block, weights, NO_TOTALS)
            old = state[at]
            change = self._rule.changed(old, gradient, bias, counters) - old
            # Numbers are added in place one by one. Storing whole rows would undo concurrent updates of other threads.
            np.add.at(numbers, (at[:, None] * width + columns).ravel(), change.ravel())
            counters.examples += block.rows
            counters.updates += 1
            total += loss
        return total

    def snapshot(self) -> TableSnapshot:
        """Return all rows. This must not be called during a pass."""
        return TableSnapshot(self._places, self._state, np.zeros(self._rule.width), replace(self._counters))

    def table(self) -> RangeTable:
        """Return the rows as a table. This must not be called during a pass."""
        return RangeTable(self._rule, self.snapshot())
