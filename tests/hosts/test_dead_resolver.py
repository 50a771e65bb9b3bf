"""A job trains on hosts whose name server never answers, and a machine is cut off for a while.

A look-up takes ten seconds there before it fails, which is longer than the cut.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from tests.hosts.pool import Pool, run_pool
from tests.hosts.training import train, train_undisturbed

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
CUT_S = 5.0


@pytest.fixture(scope="module", name="pool")
def pool_fixture() -> Iterator[Pool]:
    with run_pool(is_resolver_dead=True) as pool:
        yield pool


def test_a_machine_that_is_cut_off_loses_nothing(pool: Pool) -> None:
    def cut() -> None:
        host = pool.machines["machine-1"]
        with host.cut_from(pool.others(host)):
            time.sleep(CUT_S)

    undisturbed = train_undisturbed(pool)
    assert train(pool, "cut", cut) == undisturbed
