"""Which replica gets a request: the one that is expected to be done with it first.

"Shortest expected delay": a replica's outstanding sequences and the new ones, divided by its speed. Of replicas that
are equally fast that is the one with the least outstanding work; a fast one gets more of the requests than a slow one.
All sequences of one request go together, so what they have in common is computed once; since each of them counts, that
takes nothing from others: the next request goes elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backlog:
    """What one replica has to do."""

    sequences: int
    """Running and queued."""
    tokens_per_s: float | None = None
    """With all sequences in flight, as it was planned; None where that is not known."""


def in_turn(backlogs: Sequence[Backlog], new: int = 1) -> list[int]:
    """Return the indexes of replicas, that which is to be asked first at the front.

    Args:
        backlogs: of each replica. A speed that is not known is taken to be the mean of those that are.
        new: sequences of the request.
    """
    known = [each.tokens_per_s for each in backlogs if each.tokens_per_s]
    mean = sum(known) / len(known) if known else 1.0

    def delay(index: int) -> tuple[float, int]:
        each = backlogs[index]
        return (each.sequences + new) / (each.tokens_per_s or mean), index

    return sorted(range(len(backlogs)), key=delay)
