"""Properties of the token bucket, on a clock that the tests choose."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from share_compute.rate_limit import TokenBucket

RATES = st.floats(8_000, 1e9)
TRANSFERS = st.lists(st.tuples(st.floats(0, 10), st.integers(0, 4_000_000)), min_size=1, max_size=30)
"""Each transfer's pause after the reservation of the one before, in seconds, and its size in bytes."""


def starts(bucket: TokenBucket, transfers: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return the time at which each transfer begins, with its size. Reservations do not wait for earlier transfers."""
    due_s, now_s, found = -inf, 0.0, []
    for pause_s, size_bytes in transfers:
        now_s += pause_s
        due_s, wait_s = bucket.take(due_s, now_s, size_bytes)
        found.append((now_s + wait_s, size_bytes))
    return found


@given(RATES, st.integers(0, 1_000_000), TRANSFERS)
def test_no_interval_has_more_than_the_burst_the_rate_and_one_transfer(
    rate: float, burst: int, transfers: list[tuple[float, int]]
) -> None:
    found = starts(TokenBucket(rate, burst), transfers)
    for first in range(len(found)):
        total = 0
        for last in range(first, len(found)):
            seconds = found[last][0] - found[first][0]
            assert total <= burst + rate * seconds + 1e-6 * (1 + total)
            total += found[last][1]


@given(RATES, TRANSFERS)
def test_transfers_begin_in_order_and_never_before_their_reservation(
    rate: float, transfers: list[tuple[float, int]]
) -> None:
    times = [start_s for start_s, _ in starts(TokenBucket(rate), transfers)]
    assert times == sorted(times)
    reserved_s = 0.0
    for (pause_s, _), start_s in zip(transfers, times, strict=True):
        reserved_s += pause_s
        assert start_s >= reserved_s


@given(RATES, st.integers(0, 1_000_000), st.lists(st.integers(1, 4_000_000), min_size=2, max_size=30))
def test_a_full_queue_uses_the_whole_rate(rate: float, burst: int, sizes: list[int]) -> None:
    found = starts(TokenBucket(rate, burst), [(0.0, size) for size in sizes])
    expected_s = max(0.0, (sum(sizes[:-1]) - burst) / rate)
    assert found[-1][0] == pytest.approx(expected_s, rel=1e-9, abs=1e-9)


@given(RATES, st.floats(0, 1e6), st.integers(0, 2**40))
def test_the_first_transfer_begins_at_once(rate: float, now_s: float, size_bytes: int) -> None:
    assert TokenBucket(rate).take(-inf, now_s, size_bytes)[1] == 0.0


def test_a_second_transfer_waits_until_the_first_is_paid() -> None:
    bucket = TokenBucket(1_000_000, burst_bytes=250_000)
    due_s, wait_s = bucket.take(-inf, 100.0, 2_000_000)
    assert (due_s, wait_s) == (102.0, 0.0)
    assert bucket.take(due_s, 100.5, 1_000_000) == (103.0, pytest.approx(1.25))
