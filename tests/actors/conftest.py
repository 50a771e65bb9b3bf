"""Fixtures of the tests of actors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _own_threads() -> Iterator[None]:
    """Restore the number of torch's threads, which ranks and members set for their whole process; bits depend on it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
