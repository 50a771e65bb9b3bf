"""The slabs that the pools hold, as the server knows them: room, and first tokens that can be copied.

A slab takes its whole capacity from the turn that opens it, or makes it grow, until the turn that closes it. When its
sequence ends, it is kept for its first tokens until its room is needed; the one that was used longest ago goes first.
Since every pool executes the turns in order, room that one turn frees is there for the next, and what one turn writes
can be copied in the next, however many turns are in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

from share_compute.serving.live_sequence import LiveSequence
from share_compute.serving.prefixes import BLOCK, PrefixIndex, common_tokens

_MOST_COMPARED = 8
"""Slabs with the same first blocks that are compared token by token."""


@dataclass(slots=True)
class _Entry:
    """What is known of one slab."""

    capacity_tokens: int
    tokens: list[int]
    """Of the sequence: shared with it while it runs, those that were written once it has ended."""
    keys: list[int]
    indexed: int = 0
    """How many of the keys the index has."""
    written: int = 0
    """Positions that are written before the turn that is being made."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """First tokens that another slab has, or will have."""

    sequence: int
    num_tokens: int
    """Positions that can be copied now."""
    is_growing: bool
    """Whether it is worth to wait: turns to come will write at least a block more of what is common."""


class SlabLedger:
    """All slabs of one epoch.

    Args:
        kv_tokens: room for all of them.
    """

    def __init__(self, kv_tokens: int) -> None:
        self.kv_tokens = kv_tokens
        self.used_tokens = 0
        """Capacity of slabs whose sequences run."""
        self.cached_tokens = 0
        """Capacity of slabs whose sequences have ended."""
        self._entries: dict[int, _Entry] = {}
        self._cached: dict[int, None] = {}
        """Ended sequences, the one used longest ago first."""
        self._copied: set[int] = set()
        """Those that the turn being made copies from. It cannot close them: it closes before it opens."""
        self._closing: list[int] = []
        self._index = PrefixIndex()

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._entries

    def fits(self, capacity_tokens: int) -> bool:
        """Return whether there is room, if need be in the place of slabs whose sequences have ended."""
        kept = sum(self._entries[sequence].capacity_tokens for sequence in self._copied)
        return self.used_tokens + kept + capacity_tokens <= self.kv_tokens

    def find(self, live: LiveSequence) -> Prefix | None:
        """Return the longest beginning of a sequence that is worth a copy, or will be."""
        tokens = live.tokens[:-1]  # the last one must be computed: the next token is sampled from it
        blocks, holders = self._index.deepest(live.keys[: len(tokens) // BLOCK], _MOST_COMPARED)
        best: Prefix | None = None
        for holder in holders:
            entry = self._entries[holder]
            common = common_tokens(tokens, entry.tokens, blocks * BLOCK)
            ready = min(common, entry.written)
            if common and (best is None or ready > best.num_tokens):
                best = Prefix(holder, ready, is_growing=common - ready >= BLOCK)
        return best

    def open(self, live: LiveSequence, prefix: Prefix | None) -> tuple[int | None, int]:
        """Make a slab for a sequence that fits.

        Args:
            live: the sequence.
            prefix: what `find` returned.

        Returns:
            What to copy: from which sequence, and how many tokens. Nothing (None, 0) where there is no prefix, or
            where the slab that has it must go, since there is no room for both.
        """
        source = prefix.sequence if prefix is not None and prefix.num_tokens >= BLOCK else None
        if source in self._cached:
            del self._cached[source]
            self._cached[source] = None  # used now: goes last
        capacity_tokens = live.wanted_tokens
        self._make_room(capacity_tokens)
        self._entries[live.id] = _Entry(capacity_tokens, live.tokens, live.keys)
        self.used_tokens += capacity_tokens
        self.extend(live.id)
        if prefix is None or source not in self._entries:
            return None, 0
        if source in self._cached:
            self._copied.add(source)
        return source, prefix.num_tokens

    def grow(self, sequence: int, capacity_tokens: int) -> bool:
        """Make a slab larger, if the larger one fits beside it: return whether it did."""
        if not self.fits(capacity_tokens):
            return False
        self._make_room(capacity_tokens)
        entry = self._entries[sequence]
        self.used_tokens += capacity_tokens - entry.capacity_tokens
        entry.capacity_tokens = capacity_tokens
        return True

    def extend(self, sequence: int) -> None:
        """Take note that more tokens of a sequence are known."""
        entry = self._entries[sequence]
        if entry.indexed < len(entry.keys):
            self._index.add(sequence, entry.keys[entry.indexed :])
            entry.indexed = len(entry.keys)

    def write(self, sequence: int, stop: int) -> None:
        """Take note that the turn that was made writes all positions before ``stop``."""
        self._entries[sequence].written = stop

    def retire(self, sequence: int) -> None:
        """Take note that a sequence has ended: its slab is kept as long as nobody needs the room."""
        entry = self._entries[sequence]
        self.used_tokens -= entry.capacity_tokens
        self.cached_tokens += entry.capacity_tokens
        # Behind what is known there may be inputs that were never told: fed back after the end.
        entry.tokens = entry.tokens[: entry.written]
        entry.written = len(entry.tokens)
        blocks = entry.written // BLOCK
        self._index.remove(sequence, entry.keys[blocks : entry.indexed])
        entry.keys, entry.indexed = entry.keys[:blocks], blocks
        self._cached[sequence] = None
        if not blocks:
            self._close(sequence)

    def forget(self, sequence: int) -> None:
        """Close the slab of an ended sequence, if it is kept: another one gets its number."""
        if sequence in self._cached:
            self._close(sequence)

    def give_up(self, sequence: int) -> None:
        """Close the slab of a sequence that goes on later, in another one."""
        self.retire(sequence)
        self.forget(sequence)

    def drop_cached(self) -> None:
        """Close all slabs whose sequences have ended."""
        for sequence in list(self._cached):
            self._close(sequence)

    @property
    def has_closes(self) -> bool:
        """Whether there are slabs to be closed."""
        return bool(self._closing)

    def take_closes(self) -> tuple[int, ...]:
        """Return the slabs that are closed by the turn that was being made: it is complete now."""
        self._copied.clear()
        closes, self._closing = tuple(self._closing), []
        return closes

    def _make_room(self, capacity_tokens: int) -> None:
        lacking = self.used_tokens + self.cached_tokens + capacity_tokens - self.kv_tokens
        for oldest in list(self._cached) if lacking > 0 else ():
            if oldest not in self._copied:
                lacking -= self._entries[oldest].capacity_tokens
                self._close(oldest)
            if lacking <= 0:
                return

    def _close(self, sequence: int) -> None:
        entry = self._entries.pop(sequence)
        del self._cached[sequence]
        self._index.remove(sequence, entry.keys[: entry.indexed])
        self.cached_tokens -= entry.capacity_tokens
        self._closing.append(sequence)
