"""Measures a sparse model on rows that are not used for training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from share_compute.sparse.blocks import Block, Floats
from share_compute.sparse.cocoa import DualLoss
from share_compute.sparse.keys import Places
from share_compute.sparse.measuring.tallies import Tally, area_of, mean_of, merged, tally_of
from share_compute.sparse.models import Logistic, MatrixFactorization, SparseModel
from share_compute.sparse.table import RowValues
from share_compute.sparse.topics import TopicModel

Numbers: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SparseEvaluation:
    """Loss and metrics on rows; metrics that the model does not have are None."""

    loss: float
    """Mean loss of a row; of a document, for topics."""
    accuracy: float | None = None
    auroc: float | None = None
    """None if all rows are of one class."""
    rmse: float | None = None
    mae: float | None = None
    perplexity: float | None = None
    """exp(loss of a word), for topics."""


def evaluated(model: SparseModel, rows: RowValues, blocks: Sequence[Block]) -> SparseEvaluation:
    """Return loss and metrics on blocks.

    Args:
        model: the model.
        rows: all rows of weights, in the order of places.
        blocks: rows of data.
    """
    totals = np.append(rows.values.sum(axis=0, dtype=np.float64), float(len(rows.places)))
    return evaluation_of(
        model, merged(tally_of(model, block, _weights(rows, block.places), totals) for block in blocks)
    )


def evaluation_of(model: SparseModel, tally: Tally) -> SparseEvaluation:
    """Return loss and metrics from the sums over all measured rows."""
    if not tally.is_finite:
        return SparseEvaluation(math.inf)
    loss = mean_of(tally.loss, tally.rows)
    if isinstance(model, TopicModel):
        of_word = tally.loss / max(1, tally.words)
        return SparseEvaluation(loss, perplexity=math.exp(min(of_word, 700.0)))
    if isinstance(model, MatrixFactorization):
        rmse = math.sqrt(mean_of(tally.squares, tally.rows))
        return SparseEvaluation(loss, rmse=rmse, mae=mean_of(tally.absolutes, tally.rows))
    return SparseEvaluation(loss, accuracy=tally.correct / tally.rows, auroc=area_of(tally))


def dual_evaluated(
    loss: DualLoss, places: Places, weights: Numbers, blocks: Sequence[Block]
) -> SparseEvaluation:
    """Return loss and metrics of a linear model that CoCoA solves.

    Args:
        loss: loss of the problem.
        places: all places, in their order.
        weights: weight of each place.
        blocks: rows of data.
    """
    rows = RowValues(places, weights.astype(np.float32)[:, None])
    scores = np.concatenate([Logistic().scores(block, _weights(rows, block.places)) for block in blocks])
    found = scores.astype(np.float64)
    targets = np.concatenate([block.targets for block in blocks]).astype(np.float64)
    if loss == "hinge":
        return of_classes(float(np.maximum(0, 1 - targets * found).mean()), found, targets)
    return of_numbers(float(0.5 * np.mean((found - targets) ** 2)), found, targets)


def of_classes(loss: float, scores: Numbers, targets: Numbers) -> SparseEvaluation:
    """Return the metrics of scores; a positive score predicts the class with the larger target."""
    is_positive = targets > 0
    accuracy = float(np.mean((scores > 0) == is_positive))
    positives = int(is_positive.sum())
    negatives = len(targets) - positives
    auroc = None
    if positives and negatives:
        ranks = float(rankdata(scores)[is_positive].sum())
        auroc = (ranks - positives * (positives + 1) / 2) / (positives * negatives)
    return SparseEvaluation(loss, accuracy=accuracy, auroc=auroc)


def of_numbers(loss: float, scores: Numbers, targets: Numbers) -> SparseEvaluation:
    """Return the metrics of predicted numbers."""
    errors = scores - targets
    return SparseEvaluation(loss, rmse=float(np.sqrt(np.mean(errors**2))), mae=float(np.mean(np.abs(errors))))


def _weights(rows: RowValues, places: Places) -> Floats:
    """Return the weights of places, ``[places, width]``; zeros for places without a row."""
    if not len(rows.places):
        return np.zeros((len(places), rows.values.shape[1]), np.float32)
    at = np.minimum(np.searchsorted(rows.places, places), len(rows.places) - 1)
    weights: Floats = np.where((rows.places[at] == places)[:, None], rows.values[at], np.float32(0))
    return weights
