"""Load balancing: a request goes to the replica that is expected to finish it first.

The policy is "shortest expected delay": a replica's outstanding sequences plus the new ones, divided by its
speed. Among equally fast replicas it picks the one with the least outstanding work. A fast replica gets more
requests than a slow one. All sequences of one request go to the same replica, so their common tokens are
computed once. Each of them counts as load, so the next request tends to go to another replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backlog:
    """Outstanding work of one replica, and its speed."""

    sequences: int
    """Number of sequences, running and queued."""
    tokens_per_s: float | None = None
    """Predicted rate of tokens of the whole replica at full load; None if unknown."""


def in_turn(backlogs: Sequence[Backlog], new: int = 1) -> list[int]:
    """Return the indexes of the replicas in the order to try them, shortest expected delay first.

    Args:
        backlogs: backlog of each replica. The mean of the known speeds replaces an unknown one.
        new: number of sequences in the request.
    """
    known = [each.tokens_per_s for each in backlogs if each.tokens_per_s]
    mean = sum(known) / len(known) if known else 1.0

    def delay(index: int) -> tuple[float, int]:
        each = backlogs[index]
        return (each.sequences + new) / (each.tokens_per_s or mean), index

    return sorted(range(len(backlogs)), key=delay)
