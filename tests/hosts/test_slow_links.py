"""Links are slow while a job trains: its result is that of an undisturbed job."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from tests.hosts.network import Host
from tests.hosts.pool import Pool
from tests.hosts.training import Result, train, train_undisturbed

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
DELAY_S = 0.02
BYTES_PER_S = 2e6


@pytest.fixture(scope="module")
def undisturbed(pool: Pool) -> Result:
    return train_undisturbed(pool)


def host_of(pool: Pool, end: str) -> Host:
    return pool.host if end == "server" else pool.machines[end]


@pytest.mark.parametrize("end", ["machine-1", "server"])
def test_a_job_over_a_slow_link_has_the_same_result(pool: Pool, undisturbed: Result, end: str) -> None:
    with host_of(pool, end).slow(DELAY_S, BYTES_PER_S):
        assert train(pool, f"slow-{end}") == undisturbed


@pytest.mark.parametrize("end", ["machine-1", "server"])
def test_a_link_may_become_slow_while_a_job_trains(pool: Pool, undisturbed: Result, end: str) -> None:
    slow = host_of(pool, end).slow(DELAY_S, BYTES_PER_S)
    with ExitStack() as stack:
        assert train(pool, f"slower-{end}", lambda: stack.enter_context(slow)) == undisturbed
