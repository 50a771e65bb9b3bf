"""Keys, tables and messages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from share_compute.errors import UserError, VerificationFailed
from share_compute.sparse.blocks import RawRows, block_of, cut_of
from share_compute.sparse.keys import (
    BIAS,
    KeyCache,
    PlaceIndex,
    Places,
    cuts,
    digest_of,
    keys_of,
    places_of,
)
from share_compute.sparse.messages import (
    HEADER,
    FilterOptions,
    KeysUnknown,
    PushFilter,
    ValueType,
    decode,
    encode,
)
from share_compute.sparse.minibatches import WorkerRows
from share_compute.sparse.models import FactorizationMachine
from share_compute.sparse.rules import AdaGradRows, FollowTheLeader
from share_compute.sparse.settings import SparseModelName, SparseSettings
from share_compute.sparse.table import RangeTable, RowValues, summed

PLACES = np.sort(places_of(np.arange(1000, dtype=np.uint64)))


def drawn(count: int, width: int = 1, seed: int = 0) -> RowValues:
    draw = np.random.default_rng(seed)
    places = PLACES[np.sort(draw.choice(1000, count, replace=False))]
    return RowValues(places, draw.normal(size=(count, width)).astype(np.float32), digest_of(places))


@given(st.lists(st.integers(0, (1 << 63) - 1), min_size=1, max_size=50), st.booleans())
@settings(max_examples=200, deadline=None)
def test_places_have_one_key(keys: list[int], is_second: bool) -> None:
    array = np.array(keys, np.uint64)
    back, kinds = keys_of(places_of(array, is_second=is_second))
    assert back.tolist() == keys
    assert set(kinds.tolist()) == {is_second}


def test_keys_beyond_the_limit_are_refused() -> None:
    with pytest.raises(UserError, match="not below 2"):
        places_of(np.array([1 << 63], np.uint64))


def test_the_bias_has_no_key_of_a_feature() -> None:
    assert keys_of(np.array([BIAS], np.uint64))[1].tolist() == [True]


@pytest.mark.parametrize("ranges", [1, 2, 3, 7])
def test_ranges_have_about_equal_numbers_of_small_keys(ranges: int) -> None:
    places = np.sort(places_of(np.arange(70_000, dtype=np.uint64)))
    ends = cuts(places, ranges)
    assert (ends[0], ends[-1]) == (0, 70_000)
    assert np.diff(ends).min() > 0.95 * 70_000 / ranges


@given(st.lists(st.lists(st.integers(0, 60), unique=True), max_size=8))
@settings(max_examples=200, deadline=None)
def test_rows_of_places_never_change(additions: list[list[int]]) -> None:
    index, known = PlaceIndex(), dict[int, int]()
    for keys in additions:
        places = places_of(np.array(keys, np.uint64))
        for key, row in zip(keys, index.add(places).tolist(), strict=True):
            assert known.setdefault(key, row) == row
        assert len(index) == len(known)
    everything = places_of(np.arange(61, dtype=np.uint64))
    assert index.find(everything).tolist() == [known.get(key, -1) for key in range(61)]
    assert index.find(index.in_row_order).tolist() == list(range(len(index)))


def check_rows(additions: list[Places], others: Places) -> None:
    """Compare an index with a dictionary."""
    index, known = PlaceIndex(), dict[int, int]()
    for places in additions:
        for place in places.tolist():
            known.setdefault(place, len(known))
        assert index.add(places).tolist() == [known[place] for place in places.tolist()]
        assert index.find(others).tolist() == [known.get(place, -1) for place in others.tolist()]
    assert index.in_row_order.tolist() == list(known)
    assert index.sorted.tolist() == sorted(known)
    assert index.find(others).tolist() == [known.get(place, -1) for place in others.tolist()]


def test_many_places_are_found() -> None:
    draw = np.random.default_rng(4)
    everything = np.append(places_of(np.arange(30_000, dtype=np.uint64)), np.uint64((1 << 64) - 1))
    check_rows(
        [draw.choice(everything, count, replace=False) for count in (9000, 50, 20_000, 9000)], everything
    )


def test_places_with_the_same_first_bits_are_found() -> None:
    together = np.arange(1 << 63, (1 << 63) + 20_000, dtype=np.uint64)
    check_rows([together[::2], np.sort(together[1:500:2])], together)


def test_the_layout_of_a_table_changes_no_bit() -> None:
    class ByRow(FollowTheLeader):
        """The same rule, with the numbers of a row side by side."""

        @property
        def is_by_column(self) -> bool:
            return False

    tables = [RangeTable(kind(l1=0.001, l2=0.1)) for kind in (FollowTheLeader, ByRow)]
    bias = np.sort(np.append(PLACES[:600], np.uint64(BIAS)))
    for seed in range(8):
        update = drawn(300 + 80 * seed, seed=seed)
        if seed % 2:
            values = np.random.default_rng(seed).normal(size=(601, 1)).astype(np.float32)
            update = RowValues(bias, values, digest_of(bias))
        shown = [table.weights(update.places, update.digest).tobytes() for table in tables]
        assert shown[0] == shown[1]
        for table in tables:
            table.apply(update, 10)
    assert tables[0].digest() == tables[1].digest()
    states = [table.snapshot().state for table in tables]
    assert states[0].tobytes() == states[1].tobytes()


@pytest.mark.parametrize("width", [0, 1, 5])
@pytest.mark.parametrize("value_type", ["float32", "int8"])
def test_messages_return_what_was_sent(width: int, value_type: ValueType) -> None:
    rows, cache = drawn(333, width), KeyCache()
    found = decode(encode(rows, value_type, with_places=True), cache, width)
    assert found.places.tolist() == rows.places.tolist()
    step = float(np.abs(rows.values).max(initial=0)) / 127
    assert np.abs(found.values - rows.values).max(initial=0) <= (0.51 * step if value_type == "int8" else 0)
    without = encode(rows, value_type, with_places=False)
    again = decode(without, cache, width)
    assert again.values.tolist() == found.values.tolist()
    assert again.digest == rows.digest


def test_a_list_of_keys_that_the_receiver_lacks_is_asked_for() -> None:
    with pytest.raises(KeysUnknown):
        decode(encode(drawn(5), "float32", with_places=False), KeyCache(), 1)


def test_lists_of_keys_are_dropped_when_there_are_too_many() -> None:
    cache = KeyCache(most_places=100)
    first, second = drawn(60, seed=1), drawn(60, seed=2)
    for rows in (first, second):
        cache.put(rows.digest, rows.places)
    assert cache.get(first.digest) is None
    assert cache.get(second.digest) is not None


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_messages_are_refused(data: st.DataObject) -> None:
    """No content makes the receiver fail in another way, or accept rows of another shape."""
    content = bytearray(
        encode(drawn(40, 2), data.draw(st.sampled_from(["float32", "int8"])), with_places=True)
    )
    match data.draw(st.integers(0, 2)):
        case 0:
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        case 1:
            content[data.draw(st.integers(0, HEADER.size + 40 * 8 - 1))] ^= 1 << data.draw(st.integers(0, 7))
        case _:
            content += b"x" * data.draw(st.integers(1, 9))
    with pytest.raises((VerificationFailed, KeysUnknown)):
        decode(bytes(content), KeyCache(), 2)


def test_numbers_that_are_not_finite_are_refused() -> None:
    rows = drawn(3)
    rows.values[1] = np.nan
    with pytest.raises(VerificationFailed, match="not finite"):
        decode(encode(rows, "float32", with_places=True), KeyCache(), 1)


@pytest.mark.parametrize("value_type", ["float32", "int8"])
def test_filters_lose_nothing_but_send_it_later(value_type: ValueType) -> None:
    options, cache = FilterOptions(threshold=1.0, value_type=value_type), KeyCache()
    push_filter = PushFilter(options, 2)
    sums, arrived = np.zeros((1000, 2)), np.zeros((1000, 2))
    sizes = []
    for seed in range(30):
        rows = drawn(100, 2, seed % 5)
        rows = RowValues(rows.places, rows.values * (1 + seed), rows.digest)
        sums[np.searchsorted(PLACES, rows.places)] += rows.values
        content = push_filter.push(rows, with_places=seed < 5)
        sizes.append(len(content))
        found = decode(content, cache, 2)
        arrived[np.searchsorted(PLACES, found.places)] += found.values
    assert sizes[-1] < 0.95 * (HEADER.size + 100 * 2 * 4)
    rest = push_filter.rest()
    assert len(rest.places) > 0
    arrived[np.searchsorted(PLACES, rest.places)] += rest.values
    np.testing.assert_allclose(arrived, sums, rtol=1e-4, atol=1e-3)
    assert len(push_filter.rest().places) == 0


def test_without_filters_messages_are_exact() -> None:
    rows = drawn(50)
    content = PushFilter(FilterOptions(), 1).push(rows, with_places=True)
    assert decode(content, KeyCache(), 1).values.tolist() == rows.values.tolist()


def test_several_messages_become_one() -> None:
    parts = [drawn(100, 2, seed) for seed in range(4)]
    total = summed(parts, 2)
    assert (np.diff(total.places.astype(object)) > 0).all()
    for place, value in zip(total.places, total.values, strict=True):
        expected = sum(part.values[part.places == place].sum(axis=0) for part in parts)
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    same = summed([parts[0], parts[0]], 2)
    assert same.digest == parts[0].digest
    assert summed([], 2).values.shape == (0, 2)


def test_pulls_create_no_rows_and_show_first_values() -> None:
    table = RangeTable(AdaGradRows(3, seed=5))
    shown = table.weights(PLACES[:10])
    assert len(table) == 0
    assert np.abs(shown[:, 1:]).min() > 0
    table.apply(RowValues(PLACES[:10], np.zeros((10, 3), np.float32)), 1)
    assert table.weights(PLACES[:10]).tolist() == shown.tolist()


def test_a_table_is_restored_to_the_bit() -> None:
    table = RangeTable(FollowTheLeader(l2=0.1))
    for seed in range(5):
        table.apply(drawn(50, seed=seed), 10)
    again = RangeTable(table.rule, table.snapshot())
    for each in (table, again):
        each.apply(drawn(70, seed=9), 3)
    assert again.digest() == table.digest()
    assert again.everything().values.tolist() == table.everything().values.tolist()


def test_parts_of_ranges_cover_a_block() -> None:
    cut = cut_of(PLACES, 3)
    assert np.concatenate([PLACES[part] for part in cut.slices]).tolist() == PLACES.tolist()
    assert cut.digests[1] == digest_of(PLACES[cut.slices[1]])


@pytest.mark.parametrize("model", ["logistic", "factorization_machine", "matrix_factorization"])
def test_an_update_that_would_give_infinite_rows_changes_nothing(model: SparseModelName) -> None:
    rule = SparseSettings(model, workers=1, ranges=1, factors=2).build_rule()
    table, places = RangeTable(rule), places_of(np.arange(3, dtype=np.uint64))
    places.sort()
    table.apply(RowValues(places, np.ones((3, rule.width), np.float32)), 1)
    before = table.digest()
    with pytest.raises(VerificationFailed, match="not finite") as caught:
        table.apply(RowValues(places, np.full((3, rule.width), 1e20, np.float32)), 1)
    assert "learning_rate" in (caught.value.hint or "")
    assert table.digest() == before


def test_an_infinite_gradient_is_named_with_its_minibatch() -> None:
    rows = RawRows(np.array([0, 2]), np.arange(2, dtype=np.uint64), np.full(2, 1e12), np.ones(1))
    worker = WorkerRows([block_of(rows)], 1, 1, 0, 3)
    weights = np.full((2, 3), 1e20, np.float32)
    with pytest.raises(VerificationFailed, match="minibatch 1 of worker 3 is not finite"):
        worker.updates(1, FactorizationMachine(2), [weights], np.zeros(0))
