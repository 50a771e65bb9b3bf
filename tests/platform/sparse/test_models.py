"""Models and update rules: gradients, equalities with scikit-learn, and lazy rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer
from sklearn.decomposition import LatentDirichletAllocation
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler
from tests.platform.sparse.serial import mean_loss, train_serially

from share_compute.sparse.blocks import Block, RawRows, block_of
from share_compute.sparse.keys import BIAS, keys_of, places_of
from share_compute.sparse.minibatches import minibatches_of
from share_compute.sparse.models import FactorizationMachine, Logistic, MatrixFactorization, SparseModel
from share_compute.sparse.rules import AdaGradRows, FactorizationRule, FollowTheLeader, TopicRule
from share_compute.sparse.table import RangeTable, RowValues
from share_compute.sparse.topics import TopicModel


def dense_rows(features: Any, targets: Any) -> RawRows:
    num_rows, width = features.shape
    starts = np.arange(num_rows + 1, dtype=np.int64) * width
    keys = np.tile(np.arange(width, dtype=np.uint64), num_rows)
    return RawRows(starts, keys, np.ravel(features).astype(np.float64), np.asarray(targets, np.float64))


def ratings(users: Any, items: Any, values: Any) -> RawRows:
    keys = np.stack([users, items], axis=1).ravel().astype(np.uint64)
    is_second = np.tile([False, True], len(values))
    starts = np.arange(len(values) + 1, dtype=np.int64) * 2
    return RawRows(starts, keys, np.ones(len(keys)), np.asarray(values, np.float64), is_second)


def small_block(model: SparseModel) -> Block:
    draw = np.random.default_rng(1)
    if isinstance(model, MatrixFactorization):
        return block_of(ratings(draw.integers(0, 4, 12), draw.integers(0, 5, 12), draw.normal(size=12)))
    features = draw.normal(size=(6, 5)) * (draw.random((6, 5)) < 0.6)
    sparse_rows = [np.flatnonzero(row) for row in features]
    starts = np.concatenate([[0], np.cumsum([len(row) for row in sparse_rows])])
    values = np.concatenate([row[at] for row, at in zip(features, sparse_rows, strict=True)])
    keys = np.concatenate(sparse_rows).astype(np.uint64)
    return block_of(RawRows(starts, keys, values, draw.integers(0, 2, 6).astype(float)), with_bias=True)


@pytest.mark.parametrize(
    "model",
    [
        Logistic(),
        FactorizationMachine(3),
        FactorizationMachine(3, is_classifier=False),
        MatrixFactorization(3, mean=0.5),
    ],
    ids=lambda model: type(model).__name__,
)
def test_gradients_are_those_of_finite_differences(model: SparseModel) -> None:
    block = small_block(model)
    draw = np.random.default_rng(2)
    weights = draw.normal(size=(len(block.places), model.width)).astype(np.float32)
    if block.bias >= 0:
        weights[block.bias, 1:] = 0
    gradient, loss = model.gradient(block, weights, np.zeros(0))
    assert loss == pytest.approx(model.loss(block, weights, np.zeros(0)))
    for place in range(len(block.places)):
        for column in range(model.width):
            if place == block.bias and column:
                assert gradient[place, column] == 0
                continue
            sides = []
            for sign in (1, -1):
                moved = weights.copy()
                moved[place, column] += sign * 1e-2
                sides.append(model.loss(block, moved, np.zeros(0)))
            assert gradient[place, column] == pytest.approx((sides[0] - sides[1]) / 2e-2, abs=3e-3, rel=3e-3)


def test_breast_cancer_has_the_log_loss_of_scikit_learn() -> None:
    data = load_breast_cancer()
    features = StandardScaler().fit_transform(data.data)
    l2 = 1e-2
    peer = LogisticRegression(C=1 / (l2 * len(features)), tol=1e-8, max_iter=1000).fit(features, data.target)
    expected = log_loss(data.target, peer.predict_proba(features)[:, 1])
    rows = dense_rows(features, data.target)
    blocks = minibatches_of(rows, 64, seed=0, with_bias=True)
    table = RangeTable(FollowTheLeader(learning_rate=0.5, l2=l2))
    list(train_serially(Logistic(), table, blocks, passes=60))
    assert mean_loss(Logistic(), table, blocks) == pytest.approx(expected, abs=1e-3)
    learned = table.everything()
    by_key = dict(zip(keys_of(learned.places)[0].tolist(), learned.values[:, 0].tolist(), strict=True))
    bias = float(learned.values[learned.places == np.uint64(BIAS), 0][0])
    assert bias == pytest.approx(float(peer.intercept_[0]), abs=0.05)
    assert by_key[20] == pytest.approx(float(peer.coef_[0, 20]), abs=0.05)


def test_l1_makes_weights_zero() -> None:
    draw = np.random.default_rng(0)
    features = draw.normal(size=(400, 30))
    targets = (features[:, 0] - features[:, 1] > 0).astype(float)
    blocks = minibatches_of(dense_rows(features, targets), 50, seed=0)
    table = RangeTable(FollowTheLeader(l1=0.02))
    list(train_serially(Logistic(), table, blocks, passes=20))
    values = table.everything().values[:, 0]
    assert 2 <= np.count_nonzero(values) <= 10


def test_factors_find_products_that_a_linear_model_cannot() -> None:
    draw = np.random.default_rng(3)
    first, second = draw.integers(0, 6, 4000), draw.integers(6, 12, 4000)
    signs = draw.choice([-1, 1], size=12)
    targets = (signs[first] * signs[second] > 0).astype(float)
    starts = np.arange(4001, dtype=np.int64) * 2
    keys = np.stack([first, second], axis=1).ravel().astype(np.uint64)
    blocks = minibatches_of(RawRows(starts, keys, np.ones(8000), targets), 200, seed=0, with_bias=True)
    model = FactorizationMachine(4, l2=1e-4)
    rule = FactorizationRule(FollowTheLeader(), AdaGradRows(5, learning_rate=0.2, scale=0.1))
    table = RangeTable(rule)
    losses = list(train_serially(model, table, blocks, passes=15))
    assert losses[-1] < 0.1
    linear = RangeTable(FollowTheLeader())
    assert list(train_serially(Logistic(), linear, blocks, passes=15))[-1] > 0.5


def test_planted_factors_are_found() -> None:
    draw = np.random.default_rng(4)
    users, items = np.nonzero(draw.random((400, 300)) < 0.6)
    left, right = draw.normal(size=(400, 5)), draw.normal(size=(300, 5))
    noise = 0.5
    values = 3 + np.einsum("nk,nk->n", left[users], right[items]) + noise * draw.normal(size=len(users))
    is_test = draw.random(len(users)) < 0.15
    rows = ratings(users, items, values)
    mean = float(values[~is_test].mean())
    model = MatrixFactorization(5, mean=mean, l2=0.01)
    blocks = minibatches_of(rows.part(np.flatnonzero(~is_test)), 2000, seed=0)
    table = RangeTable(AdaGradRows(6, learning_rate=0.3, scale=0.3))
    list(train_serially(model, table, blocks, passes=40))
    test = block_of(rows.part(np.flatnonzero(is_test)))
    rmse = float(np.sqrt(2 * mean_loss(model, table, [test])))
    oracle = float(
        np.sqrt(np.mean((values - 3 - np.einsum("nk,nk->n", left[users], right[items]))[is_test] ** 2))
    )
    assert rmse <= 1.05 * oracle


def documents(num: int, seed: int, topics: int = 5, words: int = 120) -> Any:
    draw = np.random.default_rng(9)
    beta = draw.dirichlet(np.full(words, 0.05), size=topics)
    draw = np.random.default_rng(seed)
    theta = draw.dirichlet(np.full(topics, 0.3), size=num)
    return np.stack([draw.multinomial(80, mixed) for mixed in theta @ beta])


def test_topics_have_the_perplexity_of_scikit_learn() -> None:
    counts, held_out = documents(1000, 1), documents(200, 2)
    options = {"doc_topic_prior": 0.2, "topic_word_prior": 0.1, "learning_offset": 10.0, "batch_size": 100}
    peer = LatentDirichletAllocation(5, learning_method="online", max_iter=10, random_state=0, **options).fit(
        counts
    )
    expected = peer.perplexity(held_out)
    starts = np.concatenate([[0], np.cumsum((counts > 0).sum(axis=1))])
    at = np.nonzero(counts)
    rows = RawRows(starts, at[1].astype(np.uint64), counts[at].astype(float), np.zeros(len(counts)))
    blocks = minibatches_of(rows, 100, seed=0)
    model = TopicModel(5, alpha=0.2, eta=0.1)
    table = RangeTable(TopicRule(5, documents=1000, seed=1))
    list(train_serially(model, table, blocks, passes=10))
    learned = table.everything()
    components = np.full((5, counts.shape[1]), 0.1)
    components[:, keys_of(learned.places)[0].astype(int)] += learned.values.T
    peer.components_ = components
    peer.exp_dirichlet_component_ = np.exp(_expected_log(components))
    assert peer.perplexity(held_out) <= 1.05 * expected


def _expected_log(components: Any) -> Any:
    from scipy.special import psi

    return psi(components) - psi(components.sum(axis=1))[:, None]


def test_rows_that_no_update_touches_decay_as_others_do() -> None:
    """Lazy decay of rows: the result equals that of decaying all rows at each update, also if most have no gradient."""
    places = np.sort(places_of(np.arange(50, dtype=np.uint64)))
    draw = np.random.default_rng(5)
    for rule in (FollowTheLeader(l1=1e-3, l2=0.1), TopicRule(1, documents=100)):
        lazy, eager = RangeTable(rule), RangeTable(rule)
        everything = RowValues(places, np.zeros((50, 1), np.float32))
        for table in (lazy, eager):
            table.apply(everything, 10)
        for _ in range(20):
            touched = np.sort(draw.choice(50, 5, replace=False))
            values = draw.normal(size=(5, 1)).astype(np.float32)
            whole = np.zeros((50, 1), np.float32)
            whole[touched] = values
            lazy.apply(RowValues(places[touched], values), 10)
            eager.apply(RowValues(places, whole), 10)
        np.testing.assert_allclose(lazy.weights(places), eager.weights(places), rtol=2e-5, atol=1e-7)


def test_a_topic_table_survives_very_many_updates() -> None:
    rule = TopicRule(2, documents=10, decay=0.51, offset=1.5)
    table = RangeTable(rule)
    places = np.sort(places_of(np.arange(3, dtype=np.uint64)))
    for _ in range(400):
        table.apply(RowValues(places, np.ones((3, 2), np.float32)), 10)
    assert table.counters.folded < 1e-12, "the factor was folded into the rows"
    values = table.weights(places)
    assert np.isfinite(values).all()
    np.testing.assert_allclose(values, 1.0, rtol=1e-3)  # each update is rho D / S of counts of 1, with D = S
    np.testing.assert_allclose(table.totals, values.sum(axis=0), rtol=1e-4)
