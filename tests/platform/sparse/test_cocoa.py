"""CoCoA and Hogwild: equalities with scikit-learn and with serial training."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC
from tests.platform.sparse.serial import DualRound, mean_loss, solve_together, train_serially

from share_compute.errors import UserError, VerificationFailed
from share_compute.sparse.blocks import RawRows, block_of
from share_compute.sparse.cocoa import DualProblem, DualWorker
from share_compute.sparse.hogwild import HogwildTraining
from share_compute.sparse.keys import BIAS, Places, keys_of
from share_compute.sparse.minibatches import minibatches_of
from share_compute.sparse.models import Logistic
from share_compute.sparse.rules import FollowTheLeader, TopicRule
from share_compute.sparse.table import RangeTable
from share_compute.sparse.topics import TopicModel


def dense_rows(features: np.ndarray, targets: np.ndarray) -> RawRows:
    num_rows, width = features.shape
    starts = np.arange(num_rows + 1, dtype=np.int64) * width
    keys = np.tile(np.arange(width, dtype=np.uint64), num_rows)
    return RawRows(starts, keys, np.ravel(features).astype(np.float64), targets.astype(np.float64))


def solved(
    problem: DualProblem, rows: RawRows, *, with_bias: bool = False, gap: float = 1e-9
) -> tuple[Places, DualRound]:
    shares = [np.arange(worker, len(rows), problem.workers) for worker in range(problem.workers)]
    blocks = [block_of(rows.part(share), with_bias=with_bias) for share in shares]
    for places, result in solve_together(problem, blocks, local_passes=2):
        assert result.gap > -1e-12, "the gap is an upper bound of an error"
        if result.gap <= gap:
            return places, result
        assert result.rounds < 400, result.gap
    raise AssertionError


def by_key(places: Places, weights: np.ndarray) -> np.ndarray:
    keys, is_bias = keys_of(places)
    return np.array([weights[~is_bias][keys[~is_bias] == key][0] for key in range(int((~is_bias).sum()))])


@pytest.mark.parametrize("workers", [1, 4])
def test_ridge_equals_scikit_learn(workers: int) -> None:
    data = load_diabetes()
    features = StandardScaler().fit_transform(data.data)
    targets = (data.target - data.target.mean()) / data.target.std()
    l2 = 1.0
    rows = dense_rows(features, targets)
    places, result = solved(DualProblem("squared", l2, len(rows), workers), rows)
    stored = features.astype(np.float32).astype(np.float64)
    peer = Ridge(alpha=l2 * len(rows), fit_intercept=False, tol=1e-12).fit(stored, targets.astype(np.float32))

    def objective(weights: np.ndarray) -> float:
        return float(0.5 * np.mean((stored @ weights - targets) ** 2) + 0.5 * l2 * weights @ weights)

    found = by_key(places, result.weights)
    assert objective(found) - objective(peer.coef_) <= result.gap, "the gap proves it"
    np.testing.assert_allclose(found, peer.coef_, atol=1e-4)


def test_hinge_equals_scikit_learn() -> None:
    data = load_breast_cancer()
    features = StandardScaler().fit_transform(data.data)
    targets = 2.0 * data.target - 1
    l2 = 0.5
    rows = dense_rows(features, targets)
    places, result = solved(DualProblem("hinge", l2, len(rows), 4), rows, with_bias=True)
    stored = features.astype(np.float32).astype(np.float64)
    peer = LinearSVC(C=1 / (l2 * len(rows)), loss="hinge", tol=1e-8, max_iter=1_000_000, random_state=0)
    peer.fit(stored, targets)

    def objective(weights: np.ndarray, bias: float) -> float:
        losses = np.maximum(0, 1 - targets * (stored @ weights + bias))
        return float(losses.mean() + 0.5 * l2 * (weights @ weights + bias * bias))

    bias = float(result.weights[places == np.uint64(BIAS)][0])
    found = objective(by_key(places, result.weights), bias)
    assert found == pytest.approx(objective(peer.coef_[0], float(peer.intercept_[0])), abs=1e-6)
    np.testing.assert_allclose(by_key(places, result.weights), peer.coef_[0], atol=1e-4)


def test_adding_without_sigma_would_not_be_safe() -> None:
    """With sigma' = 1 and rows that many workers share, adding all changes overshoots; sigma' = K does not."""
    draw = np.random.default_rng(0)
    base = draw.normal(size=(1, 8))
    features = np.repeat(base, 64, axis=0) + 0.01 * draw.normal(size=(64, 8))
    rows = dense_rows(features, np.ones(64))
    blocks = [block_of(rows.part(np.arange(worker, 64, 8))) for worker in range(8)]
    gaps = []
    for _, result in solve_together(DualProblem("squared", 1e-3, 64, 8), blocks, local_passes=3):
        gaps.append(result.gap)
        if result.rounds == 30:
            break
    assert gaps[-1] < 1e-3 * gaps[0]


def test_classes_of_hinge_are_checked() -> None:
    rows = dense_rows(np.ones((2, 1)), np.array([0.0, 1.0]))
    with pytest.raises(UserError, match="neither -1 nor 1"):
        DualWorker(DualProblem("hinge", 1.0, 2, 1), block_of(rows))


def sparse_rows(num_rows: int, num_features: int, entries: int, seed: int = 0) -> RawRows:
    draw = np.random.default_rng(seed)
    planted = draw.normal(size=num_features)
    keys = draw.integers(0, num_features, (num_rows, entries))
    keys.sort(axis=1)
    keys += np.arange(entries) * num_features  # no key occurs twice in a row
    scores = planted[keys % num_features].sum(axis=1) * 2 / np.sqrt(entries)
    targets = (draw.random(num_rows) < 1 / (1 + np.exp(-scores))).astype(float)
    starts = np.arange(num_rows + 1, dtype=np.int64) * entries
    return RawRows(starts, keys.ravel().astype(np.uint64), np.ones(keys.size), targets)


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_without_locks_reach_the_loss_of_serial_training(threads: int) -> None:
    blocks = minibatches_of(sparse_rows(20_000, 500, 8), 50, seed=0, with_bias=True)
    rule = FollowTheLeader(learning_rate=0.1, l2=1e-5)
    serial = RangeTable(rule)
    list(train_serially(Logistic(), serial, blocks, passes=3))
    shared = HogwildTraining(Logistic(), rule, blocks, threads)
    losses = [shared.train(number) for number in range(3)]
    expected = mean_loss(Logistic(), serial, blocks)
    assert expected < 0.6
    assert losses[2] < losses[0]
    assert mean_loss(Logistic(), shared.table(), blocks) == pytest.approx(expected, rel=0.01)


def test_one_thread_that_continues_from_a_snapshot_has_the_same_bits() -> None:
    blocks = minibatches_of(sparse_rows(2_000, 100, 8), 50, seed=0, with_bias=True)
    rule = FollowTheLeader(learning_rate=0.1, l1=1e-4, l2=1e-5)
    whole = HogwildTraining(Logistic(), rule, blocks, 1)
    expected = [whole.train(number) for number in range(4)]
    first = HogwildTraining(Logistic(), rule, blocks, 1)
    found = [first.train(number) for number in range(2)]
    snapshot = first.snapshot()
    second = HogwildTraining(Logistic(), rule, blocks, 1, snapshot=snapshot)
    found += [second.train(number) for number in range(2, 4)]
    assert found == expected
    assert second.snapshot().state.tobytes() == whole.snapshot().state.tobytes()
    assert second.snapshot().counters == whole.snapshot().counters
    with pytest.raises(VerificationFailed, match="other keys"):
        HogwildTraining(Logistic(), rule, blocks[:1], 1, snapshot=snapshot)


def test_topics_are_not_trained_without_locks() -> None:
    rows = sparse_rows(10, 5, 2)
    with pytest.raises(ValueError, match="sum of all rows"):
        HogwildTraining(TopicModel(2, 0.1, 0.1), TopicRule(2, 10), [block_of(rows)], 2)
