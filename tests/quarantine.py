"""Tests that may fail once without a failure of the run, each with a reason and an owner.

A failed test of this list is repeated once. A test enters the list only with evidence: the failure, and a suspicion
that is being followed. Tests that compare bits, tokens or committed steps must not be on it, because a second try hides
exactly what they look for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Case(NamedTuple):
    """A reason for a repetition."""

    reason: str
    """The failure that was seen, and its suspected cause."""
    owner: str
    """The person who removes the entry."""


QUARANTINE: dict[str, Case] = {}
"""Cases by the id of the test, without parameters: ``tests/e2e/test_job.py::test_samples_come_while_it_trains``."""

EXACT_FOLDERS = tuple(
    f"tests/{name}/" for name in ("actors", "chaos", "containers", "hosts", "platform", "security")
)
"""Tests there compare bits, tokens or committed steps; tests elsewhere that do so have the marker ``exact``."""


def why_never_repeated(test_id: str, markers: Iterable[str]) -> str | None:
    """Return why a test must not be repeated; None if it may be.

    Args:
        test_id: id of the test.
        markers: names of its markers.
    """
    if test_id.startswith(EXACT_FOLDERS):
        return f"{test_id} is in a folder of tests that compare bits, tokens or committed steps"
    return f"{test_id} compares bits, tokens or committed steps" if "exact" in markers else None
