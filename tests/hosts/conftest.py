"""A cluster on several hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.hosts.cluster import Cluster, run_cluster
from tests.hosts.training import Result, train_undisturbed


@pytest.fixture(scope="package")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A server on one host and machines on three others; tests must leave them unchanged.

    The fixture ends with this package, because the thread is in the network of these hosts meanwhile.
    """
    assert isinstance(request.node, pytest.Package), "without __init__.py, it would end with the session"
    with run_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> Result:
    """The result of the job on these machines without faults; later plans may cut the batch in other ways."""
    return train_undisturbed(cluster)
