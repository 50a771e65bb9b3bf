"""A cluster on several hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.hosts.cluster import Cluster, run_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A server on one host and machines on three others."""
    with run_cluster() as cluster:
        yield cluster
