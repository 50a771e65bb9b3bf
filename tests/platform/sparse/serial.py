"""Training in one process, as the reference of training on many machines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from share_compute.sparse.blocks import Block, RawRows
from share_compute.sparse.cocoa import DualProblem, DualWorker, Vector
from share_compute.sparse.keys import Places
from share_compute.sparse.minibatches import WorkerRows
from share_compute.sparse.models import SparseModel, Totals
from share_compute.sparse.readers.prepared import rows_of
from share_compute.sparse.table import RangeTable


def totals_of(table: RangeTable) -> Totals:
    """Return the sum of the weights of all rows, and the number of rows, ``[width + 1]``."""
    return np.append(table.totals, float(len(table)))


def train_serially(
    model: SparseModel, table: RangeTable, blocks: Sequence[Block], passes: int, seed: int = 0
) -> Iterator[float]:
    """Train in this process with one table; yield the mean loss of each pass, before its updates."""
    rows = WorkerRows(blocks, 1, passes, seed, 0)
    count = sum(block.rows for block in blocks)
    for pass_number in range(passes):
        total = 0.0
        for clock in range(pass_number * len(blocks) + 1, (pass_number + 1) * len(blocks) + 1):
            block = rows.block(clock)
            weights = table.weights(block.places, rows.cut(clock).digests[0])
            [update], loss = rows.updates(clock, model, [weights], totals_of(table))
            table.apply(update, block.rows)
            total += loss
        yield total / count


def mean_loss(model: SparseModel, table: RangeTable, blocks: Sequence[Block]) -> float:
    """Return the mean loss over blocks."""
    totals = totals_of(table)
    losses = [model.loss(block, table.weights(block.places), totals) for block in blocks]
    return sum(losses) / sum(block.rows for block in blocks)


@dataclass(frozen=True, slots=True)
class DualRound:
    """Weights after a number of rounds, with their proof."""

    rounds: int
    weights: Vector
    """Weights of all places, in their order."""
    gap: float


def solve_together(
    problem: DualProblem, blocks: Sequence[Block], local_passes: int, seed: int = 0
) -> Iterator[tuple[Places, DualRound]]:
    """Run rounds of all workers in this process; yield the places and the result of each round, without end."""
    workers = [DualWorker(problem, block) for block in blocks]
    places: Places = np.unique(np.concatenate([block.places for block in blocks]))
    columns = [np.searchsorted(places, block.places) for block in blocks]
    weights: Vector = np.zeros(len(places))
    number = 0
    while True:
        results = [
            worker.solve(weights[at], local_passes, np.random.default_rng((seed, index, number)))
            for index, (worker, at) in enumerate(zip(workers, columns, strict=True))
        ]
        gap = problem.gap(
            weights, sum(each.primal_sum for each in results), sum(each.dual_sum for each in results)
        )
        yield places, DualRound(number, weights.copy(), gap)
        for result, at in zip(results, columns, strict=True):
            weights[at] += problem.scale * result.change
        number += 1


def read_prepared(folder: Path, names: Iterable[str]) -> list[RawRows]:
    """Return the rows of prepared files."""
    return [rows_of((folder / name).read_bytes()) for name in names]
