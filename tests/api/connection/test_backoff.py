"""Pauses before the next try."""

from __future__ import annotations

from itertools import islice

from share_compute_api.connection.backoff import ExponentialBackoff


def test_pauses_double_up_to_a_limit_and_begin_again_after_a_success() -> None:
    backoff = ExponentialBackoff(0.5, 3.0)
    assert [backoff.failed() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.failed() == 0.5


def test_pauses_with_jitter_differ_between_machines() -> None:
    machines = [ExponentialBackoff(0.5, 30.0, has_jitter=True) for _ in range(20)]
    longest_s = 0.5
    for pauses in islice(zip(*(iter(machine.failed, None) for machine in machines), strict=True), 2000):
        assert len(set(pauses)) > 1
        assert longest_s / 2 <= min(pauses) <= max(pauses) <= longest_s
        longest_s = min(2 * longest_s, 30.0)
