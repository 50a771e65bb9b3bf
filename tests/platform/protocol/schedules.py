"""Questions that tests ask about a schedule."""

from __future__ import annotations

from collections.abc import Sequence

from share_compute.protocol.schedule import Action


def peak_in_flight(actions: Sequence[Action]) -> int:
    """Return the largest number of microbatches whose activations are kept at one time."""
    kept = peak = 0
    for action in actions:
        kept += 1 if action.kind == "F" else -1
        peak = max(peak, kept)
    return peak
