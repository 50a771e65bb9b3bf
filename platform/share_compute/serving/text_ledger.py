"""What an encoder's pools hold of texts from turn to turn: nothing."""

from __future__ import annotations

from share_compute.serving.live_sequence import LiveSequence
from share_compute.serving.slab_ledger import Prefix, SlabLedger


class TextLedger(SlabLedger):
    """A ledger without slabs: all texts fit, and no text is worth anything to another."""

    def __init__(self) -> None:
        super().__init__(0)

    def fits(self, capacity_tokens: int) -> bool:
        """Return that there is room: how many are computed at one time is for turns to say."""
        del capacity_tokens
        return True

    def find(self, live: LiveSequence) -> Prefix | None:
        """Return that nothing can be copied: what one token becomes depends on those behind it, too."""
        del live
        return None

    def open(self, live: LiveSequence, prefix: Prefix | None) -> tuple[int | None, int]:
        """Make nothing, and copy nothing."""
        del live, prefix
        return None, 0

    def write(self, sequence: int, stop: int) -> None:
        """Keep nothing."""

    def retire(self, sequence: int) -> None:
        """Close nothing."""
