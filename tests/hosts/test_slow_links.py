"""Links are slow while a job trains: its result is that of an undisturbed job."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from tests.hosts.cluster import Cluster
from tests.hosts.network import Host
from tests.hosts.training import Result, train

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
DELAY_S = 0.02
BYTES_PER_S = 2e6


def host_of(cluster: Cluster, end: str) -> Host:
    return cluster.host if end == "server" else cluster.machines[end]


@pytest.mark.parametrize("end", ["machine-1", "server"])
def test_a_job_over_a_slow_link_has_the_same_result(cluster: Cluster, undisturbed: Result, end: str) -> None:
    with host_of(cluster, end).slow(DELAY_S, BYTES_PER_S):
        assert train(cluster, f"slow-{end}") == undisturbed


@pytest.mark.parametrize("end", ["machine-1", "server"])
def test_a_link_may_become_slow_while_a_job_trains(cluster: Cluster, undisturbed: Result, end: str) -> None:
    slow = host_of(cluster, end).slow(DELAY_S, BYTES_PER_S)
    with ExitStack() as stack:
        assert train(cluster, f"slower-{end}", lambda: stack.enter_context(slow)) == undisturbed
