"""Parameters that `make test` runs in part, and `make chaos` in full."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def thoroughly(values: Iterable[Any], quick: int) -> list[Any]:
    """Return values to parametrize by (tuples for several names); only ``quick`` of them run by default."""
    found = []
    for place, value in enumerate(values):
        each = value if isinstance(value, tuple) else (value,)
        found.append(pytest.param(*each, marks=() if place < quick else pytest.mark.thorough))
    return found


def a_few(values: Sequence[Any], every: int) -> list[Any]:
    """Return values to parametrize by; by default only one in ``every`` runs."""
    few = values[::every]
    return thoroughly([*few, *(value for value in values if value not in few)], quick=len(few))
