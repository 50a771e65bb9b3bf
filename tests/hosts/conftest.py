"""A pool on several hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.hosts.network import why_not
from tests.hosts.pool import Pool, open_pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """A server on one host and machines on three others."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with open_pool() as pool:
        yield pool
