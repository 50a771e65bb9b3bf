"""What is begun next, and whose prompt goes on: the part of a turn beside those that decode."""

from __future__ import annotations

from itertools import islice

from share_compute.serving.events import Totals
from share_compute.serving.fair_queue import FairQueue, Owner
from share_compute.serving.limits import Limits
from share_compute.serving.live_sequence import LiveSequence
from share_compute.serving.slab_ledger import Prefix, SlabLedger
from share_compute.serving.turns import Opening

_MOST_PASSES = 16
"""Sequences that are begun before an earlier one of another owner that lacks room; then all wait for it."""
_MOST_LOOKED_AT = 64
"""Waiting sequences of one owner that are looked at, where the first ones wait for the prompt of another."""


class Admission:
    """Begins sequences: an owner's in their order, owners by what they were served, all within memory.

    Memory is reserved for the prompt and a typical answer (or what was asked for, where that is less). An answer that
    becomes longer gets room for twice as long a one. Where there is none, its sequence is preempted: it gives up what
    it has, and goes on before anything new is begun, when what it wanted is free. So it is preempted a few times at
    most.

    The first sequence of the owner whose turn it is may lack room that a smaller one of another owner would not: that
    one passes it, but only so many do.

    A sequence whose first tokens are being computed for another one waits for them (completions of one prompt, one
    system prompt of many requests), and those behind it pass.

    Args:
        limits: of this epoch.
        queue: all sequences.
        ledger: all slabs of this epoch.
        totals: counts what was copied.
    """

    def __init__(self, limits: Limits, queue: FairQueue, ledger: SlabLedger, totals: Totals) -> None:
        self._limits = limits
        self._queue = queue
        self._ledger = ledger
        self._totals = totals
        self._open: dict[int, LiveSequence] = {}

    @property
    def num_open(self) -> int:
        """Sequences that run."""
        return len(self._open)

    @property
    def has_prompts(self) -> bool:
        """Whether prompts may want a part of a turn."""
        queue = self._queue
        can_begin = self.num_open < self._limits.max_sequences and (
            queue.num_waiting or queue.num_interrupted
        )
        return bool(queue.num_prefilling or can_begin)

    def next(self, opens: list[Opening], room: int) -> LiveSequence | None:
        """Return the sequence whose known tokens are to be sent next; None where there is none.

        Args:
            opens: what the turn opens; gets the sequence if it is begun by this.
            room: positions that the turn has left. An encoder's text that is longer goes first in the next turn.
        """
        if not self.has_prompts:
            return None
        passed: list[LiveSequence] = []
        # Whoever runs can still grow once: else most of them would be preempted soon.
        reserve = max((one.next_room_tokens for one in self._open.values()), default=0)
        begins = self.num_open < self._limits.max_sequences
        for owner in self._queue.in_turn():
            if owner.prefilling:
                return next(iter(owner.prefilling.values()))
            candidate = self._candidate(owner, reserve) if begins else None
            if candidate is None:
                continue
            live, prefix = candidate
            if self._limits.embeds and live.prompt_tokens > room:
                return None
            if self._ledger.fits(live.wanted_tokens + reserve):
                for one in passed:
                    one.passes += 1
                opens.append(self._begin(live, prefix))
                return live
            passed.append(live)
            begins = live.passes < _MOST_PASSES
        return None

    def ended(self, live: LiveSequence) -> None:
        """Take note that an open sequence has ended."""
        del self._open[live.id]
        self._ledger.retire(live.id)

    def preempted(self, live: LiveSequence) -> None:
        """Take note that an open sequence waits for more room."""
        del self._open[live.id]
        self._ledger.give_up(live.id)
        self._queue.interrupt([live])
        self._totals.preempted += 1

    def _candidate(self, owner: Owner, reserve: int) -> tuple[LiveSequence, Prefix | None] | None:
        """Return an owner's first sequence that does not wait for a prompt of another, or for a token of its own."""
        for live in islice(self._queue.candidates(owner), _MOST_LOOKED_AT):
            if not live.is_settled:
                continue
            if not self._ledger.fits(live.wanted_tokens + reserve):
                return live, None
            prefix = self._ledger.find(live)
            if prefix is None or not prefix.is_growing:
                return live, prefix
        return None

    def _begin(self, live: LiveSequence, prefix: Prefix | None) -> Opening:
        source, num_tokens = self._ledger.open(live, prefix)
        self._queue.begin(live)
        self._open[live.id] = live
        self._totals.prefix_hits += source is not None
        self._totals.prefix_tokens += num_tokens
        return live.open(source, num_tokens)
