"""Admission: choose the sequences that an engine step starts, and the prompts that it continues."""

from __future__ import annotations

from itertools import islice

from share_compute.inference.scheduler.engine_steps import Opening
from share_compute.inference.scheduler.events import Totals
from share_compute.inference.scheduler.fair_queue import FairQueue, OwnerQueue
from share_compute.inference.scheduler.limits import SchedulerLimits
from share_compute.inference.scheduler.live_sequence import LiveSequence
from share_compute.inference.scheduler.slot_ledger import Prefix, SlotLedger

_MOST_PASSES = 16
"""Maximum number of sequences of other owners that may overtake a sequence that lacks KV capacity."""
_MOST_EXAMINED = 64
"""Maximum number of waiting sequences of one owner that are examined to find one that can start."""


class Admission:
    """Starts sequences while KV capacity suffices, beginning with the owner that was served least.

    A sequence whose KV slot cannot grow is preempted: it gives up the slot, and continues before any new sequence
    starts. If a sequence lacks KV capacity, sequences of other owners may overtake it, up to `_MOST_PASSES` times. A
    sequence also waits while another sequence computes a prefix that the first can copy afterwards.

    Args:
        limits: limits of this epoch.
        queue: all sequences that have not ended.
        ledger: all KV slots of this epoch.
        totals: counters to which prefix copies and preemptions are added.
    """

    def __init__(self, limits: SchedulerLimits, queue: FairQueue, ledger: SlotLedger, totals: Totals) -> None:
        self._limits = limits
        self._queue = queue
        self._ledger = ledger
        self._totals = totals
        self._open: dict[int, LiveSequence] = {}

    @property
    def num_open(self) -> int:
        """Number of running sequences."""
        return len(self._open)

    @property
    def has_prompts(self) -> bool:
        """Whether the next engine step may have prompts to compute."""
        queue = self._queue
        can_begin = self.num_open < self._limits.max_sequences and (
            queue.num_waiting or queue.num_interrupted
        )
        return bool(queue.num_prefilling or can_begin)

    def next(self, opens: list[Opening], budget: int) -> LiveSequence | None:
        """Return the next sequence to prefill, and start it if it has not started.

        Return None if there is no such sequence, or if it does not fit yet.

        Args:
            opens: openings of the engine step; the sequence's opening is appended if this call starts it.
            budget: number of positions left in the engine step; a text for an encoder must fit.
        """
        if not self.has_prompts:
            return None
        passed: list[LiveSequence] = []
        # Keep capacity for the largest growth of a running sequence, so that it need not be preempted soon.
        reserve = max((one.next_slot_tokens for one in self._open.values()), default=0)
        begins = self.num_open < self._limits.max_sequences
        for owner in self._queue.in_turn():
            if owner.prefilling:
                return next(iter(owner.prefilling.values()))
            candidate = self._candidate(owner, reserve) if begins else None
            if candidate is None:
                continue
            live, prefix = candidate
            if self._limits.embeds and live.prompt_tokens > budget:
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
        """Record that a running sequence has ended; see `SlotLedger.retire`."""
        del self._open[live.id]
        self._ledger.retire(live.id)

    def preempted(self, live: LiveSequence) -> None:
        """Close the KV slot of a running sequence, and put the sequence back into the queue.

        The caller must call `LiveSequence.close` afterwards.
        """
        del self._open[live.id]
        self._ledger.give_up(live.id)
        self._queue.interrupt([live])
        self._totals.preempted += 1

    def _candidate(self, owner: OwnerQueue, reserve: int) -> tuple[LiveSequence, Prefix | None] | None:
        """Return the next sequence of an owner to start, and the prefix to copy for it; None if there is none.

        The sequence may lack KV capacity; then its prefix is None.
        """
        for live in islice(self._queue.candidates(owner), _MOST_EXAMINED):
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
