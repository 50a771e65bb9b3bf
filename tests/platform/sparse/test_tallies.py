"""Metrics have the same bits however the measured rows are divided."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from share_compute.errors import VerificationFailed
from share_compute.sparse.blocks import RawRows, block_of
from share_compute.sparse.measuring.evaluation import evaluation_of
from share_compute.sparse.measuring.tallies import (
    exact_sum,
    held_out,
    mean_of,
    merged,
    tally_bytes,
    tally_from,
    tally_of,
)
from share_compute.sparse.models import FactorizationMachine, Logistic, MatrixFactorization, SparseModel
from share_compute.sparse.topics import TopicModel

KEYS = 60


def rows_of(model: SparseModel, count: int) -> RawRows:
    draw = np.random.default_rng(5)
    if isinstance(model, MatrixFactorization):
        keys = np.stack([draw.integers(0, KEYS, count), draw.integers(0, KEYS, count)], axis=1).ravel()
        starts = np.arange(count + 1, dtype=np.int64) * 2
        seconds = np.tile([False, True], count)
        return RawRows(starts, keys.astype(np.uint64), np.ones(2 * count), draw.normal(size=count), seconds)
    counts = draw.integers(1, 9, count)
    keys = np.concatenate([np.sort(draw.choice(KEYS, each, replace=False)) for each in counts])
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    values = draw.integers(1, 5, len(keys)).astype(float)
    return RawRows(starts, keys.astype(np.uint64), values, draw.integers(0, 2, count).astype(float))


@pytest.mark.parametrize(
    "model",
    [Logistic(), FactorizationMachine(3), MatrixFactorization(3, mean=0.2), TopicModel(3, 0.1, 0.1)],
    ids=lambda model: type(model).__name__,
)
def test_metrics_have_the_same_bits_however_rows_are_dealt_out(model: SparseModel) -> None:
    rows = rows_of(model, 300)
    has_bias = isinstance(model, Logistic | FactorizationMachine)
    whole = block_of(rows, with_bias=has_bias)
    draw = np.random.default_rng(6)
    all_weights = np.abs(draw.normal(size=(len(whole.places), model.width))).astype(np.float32) + 0.1
    totals = np.append(all_weights.sum(axis=0, dtype=np.float64), float(len(all_weights)))

    def measured(parts: list[Any]) -> Any:
        tallies = []
        for part in parts:
            block = block_of(rows.part(part), with_bias=has_bias)
            weights = all_weights[np.searchsorted(whole.places, block.places)]
            tallies.append(tally_from(tally_bytes(tally_of(model, block, weights, totals))))
        idle = tally_from(tally_bytes(merged([])))  # of a worker that has no rows to measure
        return evaluation_of(model, merged([*tallies, idle]))

    expected = measured([slice(None)])
    assert math.isfinite(expected.loss)
    for workers in (2, 3, 7, 300):
        order = draw.permutation(300)
        assert measured(np.array_split(order, workers)) == expected
    if isinstance(model, Logistic):
        scores = model.scores(whole, all_weights).astype(np.float64)
        assert expected.auroc == pytest.approx(roc_auc_score(whole.targets, scores), abs=1e-12)
        assert expected.loss == pytest.approx(Logistic().loss(whole, all_weights) / 300, rel=1e-12)
        assert expected.accuracy == np.mean((scores > 0) == (whole.targets > 0))
    if isinstance(model, MatrixFactorization):
        errors = model.scores(whole, all_weights).astype(np.float64) - whole.targets
        assert expected.rmse == pytest.approx(float(np.sqrt(np.mean(errors**2))))
        assert expected.mae == pytest.approx(float(np.mean(np.abs(errors))))
    if isinstance(model, TopicModel):
        bound = -model.loss(whole, all_weights, totals)
        assert math.log(expected.perplexity) == pytest.approx(-bound / rows.values.sum(), rel=1e-3)


def test_sums_are_exact() -> None:
    draw = np.random.default_rng(1)
    values = draw.normal(size=500) * 10.0 ** draw.integers(-300, 300, 500)
    values = np.concatenate([values, [5e-324, -5e-324, 1.7e308, 0.0]])
    expected = sum(map(Fraction, values.tolist()))
    assert Fraction(exact_sum(values), 1 << 1127) == expected
    assert mean_of(exact_sum(values), 7) == float(expected / 7)
    assert mean_of(exact_sum(np.array([1.7e308] * 4)), 1) == math.inf


def test_scores_that_are_not_finite_give_an_infinite_loss() -> None:
    block = block_of(rows_of(Logistic(), 20), with_bias=True)
    weights = np.full((len(block.places), 1), np.inf, np.float32)
    assert evaluation_of(Logistic(), tally_of(Logistic(), block, weights, np.zeros(0))).loss == math.inf


def test_damaged_tallies_are_refused() -> None:
    with pytest.raises(VerificationFailed, match="measurements"):
        tally_from(b"x" * 30)


@pytest.mark.parametrize("model", [Logistic(), MatrixFactorization(2)])
def test_the_same_rows_are_held_out_whoever_reads_them(model: SparseModel) -> None:
    rows = rows_of(model, 4000)
    chosen = held_out(rows, 0.2, 3)
    assert 0.17 < chosen.mean() < 0.23
    order = np.random.default_rng(0).permutation(len(rows))
    np.testing.assert_array_equal(held_out(rows.part(order), 0.2, 3), chosen[order])
    assert (held_out(rows, 0.2, 4) != chosen).any()
    assert not held_out(rows, 0.0, 3).any()
