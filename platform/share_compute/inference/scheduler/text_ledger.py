"""Slot ledger of an encoder: it opens no KV slots, since the stages keep nothing between engine steps."""

from __future__ import annotations

from share_compute.inference.scheduler.live_sequence import LiveSequence
from share_compute.inference.scheduler.slot_ledger import Prefix, SlotLedger


class TextLedger(SlotLedger):
    """A ledger without KV slots: all texts fit, and no text can reuse positions of another text."""

    def __init__(self) -> None:
        super().__init__(0)

    def fits(self, capacity_tokens: int) -> bool:
        """Return True: texts take no KV capacity."""
        del capacity_tokens
        return True

    def find(self, live: LiveSequence) -> Prefix | None:
        """Return None: a token's hidden state depends on later tokens too, so nothing can be copied."""
        del live
        return None

    def open(self, live: LiveSequence, prefix: Prefix | None) -> tuple[int | None, int]:
        """Return (None, 0): no slot is opened, and nothing is copied."""
        del live, prefix
        return None, 0

    def write(self, sequence: int, stop: int) -> None:
        """Do nothing: no positions are written."""

    def retire(self, sequence: int) -> None:
        """Do nothing: there is no slot to keep."""
