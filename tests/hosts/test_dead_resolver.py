"""A job trains on hosts whose name server never answers, and a machine is cut off for a while.

A look-up takes ten seconds there before it fails, which is longer than the cut.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from tests.hosts.cluster import Cluster, run_cluster
from tests.hosts.training import train, train_undisturbed

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
CUT_S = 5.0


@pytest.fixture(scope="module", name="cluster")
def cluster_fixture() -> Iterator[Cluster]:
    with run_cluster(is_resolver_dead=True) as cluster:
        yield cluster


def test_a_machine_that_is_cut_off_loses_nothing(cluster: Cluster) -> None:
    def cut() -> None:
        host = cluster.machines["machine-1"]
        with host.cut_from(cluster.others(host)):
            time.sleep(CUT_S)

    undisturbed = train_undisturbed(cluster)
    assert train(cluster, "cut", cut) == undisturbed
