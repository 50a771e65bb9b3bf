"""A cluster on several hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.hosts.cluster import Cluster, run_cluster
from tests.hosts.training import Result, train_undisturbed


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A server on one host and machines on three others; tests must leave them unchanged."""
    with run_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> Result:
    """The result of the job on these machines without faults; later plans may cut the batch in other ways."""
    return train_undisturbed(cluster)
