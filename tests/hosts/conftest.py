"""A cluster on several hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.hosts.cluster import Cluster, run_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A server on one host and machines on three others; tests must leave them unchanged."""
    with run_cluster() as cluster:
        yield cluster
