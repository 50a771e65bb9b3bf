"""A store on each database."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.databases import Clock, clock, database_url, open_store, postgres_server

from share_compute.store import Store

__all__ = ["Clock", "clock", "database_url", "open_store", "postgres_server"]


@pytest.fixture
def store(open_store: Callable[[], Store]) -> Store:
    return open_store()
