"""The delay of exponential backoff."""

from __future__ import annotations

import math

from share_compute.backoff import backoff_s


def test_delays_double_up_to_the_longest() -> None:
    assert [backoff_s(5.0, failures, 30.0) for failures in range(5)] == [5.0, 10.0, 20.0, 30.0, 30.0]


def test_a_count_of_failures_that_grows_for_days_does_not_overflow() -> None:
    assert math.isfinite(backoff_s(5.0, 10**6))
