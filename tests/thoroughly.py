"""Cases of which `make test` runs some and `make chaos` all."""

from collections.abc import Iterable
from typing import Any

import pytest


def thoroughly(values: Iterable[Any], quick: int) -> list[Any]:
    """Return values to parametrize by; those after the first ``quick`` are left out unless asked for."""
    marks = pytest.mark.thorough
    return [
        value if place < quick else pytest.param(value, marks=marks) for place, value in enumerate(values)
    ]
