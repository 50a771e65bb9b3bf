"""A pool on several hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.hosts.pool import Pool, run_pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """A server on one host and machines on three others, which all tests leave as they find them."""
    with run_pool() as pool:
        yield pool
