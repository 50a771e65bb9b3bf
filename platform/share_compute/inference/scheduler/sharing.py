"""Load balancing between replicas, by the policy "shortest expected delay".

The delay is the number of a replica's sequences, including the new ones, divided by its speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backlog:
    """Load and speed of one replica."""

    sequences: int
    """Number of sequences, running and queued."""
    tokens_per_s: float | None = None
    """Predicted rate of tokens of the whole replica at full load; None if unknown."""


def in_turn(backlogs: Sequence[Backlog], new: int = 1) -> list[int]:
    """Return the indexes of the replicas in the order to try them, shortest expected delay first.

    Args:
        backlogs: load and speed of each replica. An unknown speed is replaced by the mean of the known ones.
        new: number of sequences in the request.
    """
    known = [each.tokens_per_s for each in backlogs if each.tokens_per_s]
    mean = sum(known) / len(known) if known else 1.0

    def delay(index: int) -> tuple[float, int]:
        each = backlogs[index]
        return (each.sequences + new) / (each.tokens_per_s or mean), index

    return sorted(range(len(backlogs)), key=delay)
