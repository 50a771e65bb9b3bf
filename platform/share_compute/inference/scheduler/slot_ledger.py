"""The server's record of the KV slots that the stages hold: their capacity, and prefixes that can be copied.

When a sequence ends, its slot is kept for prefix copies until its capacity is needed; the least recently used slot is
closed first. Every stage executes the steps in order. So a step can use capacity that an earlier step frees, and copy
positions that an earlier step writes, while the earlier step is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

from share_compute.inference.scheduler.live_sequence import LiveSequence
from share_compute.inference.scheduler.prefixes import BLOCK, PrefixIndex, common_tokens

_MOST_COMPARED = 8
"""Maximum number of KV slots with the same first blocks that are compared token by token."""


@dataclass(slots=True)
class _Entry:
    """State of one KV slot."""

    capacity_tokens: int
    tokens: list[int]
    """While the sequence runs, the list `LiveSequence.tokens` itself; once it has ended, a copy of the
    written tokens."""
    keys: list[int]
    """Keys of the full blocks of the tokens; see `share_compute.inference.scheduler.prefixes`."""
    indexed: int = 0
    """Number of ``keys``, from the first, that are in the prefix index."""
    written: int = 0
    """Number of positions, from the first, that the engine steps built so far write."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix that a sequence has in common with the sequence of a KV slot."""

    sequence: int
    """Id of the sequence whose KV slot has the prefix."""
    num_tokens: int
    """Number of positions that can be copied now."""
    is_growing: bool
    """Whether later steps will write at least one more block of the common prefix."""


class SlotLedger:
    """Assigns KV capacity to the slots of one epoch, and finds prefixes that can be copied.

    Args:
        kv_tokens: KV capacity for all slots together.
    """

    def __init__(self, kv_tokens: int) -> None:
        self.kv_tokens = kv_tokens
        self.used_tokens = 0
        """Total capacity, in positions, of slots whose sequences run."""
        self.cached_tokens = 0
        """Total capacity, in positions, of slots whose sequences have ended."""
        self._entries: dict[int, _Entry] = {}
        self._cached: dict[int, None] = {}
        """Ended sequences with a slot, the least recently used first."""
        self._copied: set[int] = set()
        """Ended sequences that the engine step being built copies from. A step closes slots before it copies, so
        slots of these sequences stay open."""
        self._closing: list[int] = []
        self._index = PrefixIndex()

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._entries

    def fits(self, capacity_tokens: int) -> bool:
        """Return whether a new slot of this capacity fits, possibly after closing slots of ended sequences."""
        kept = sum(self._entries[sequence].capacity_tokens for sequence in self._copied)
        return self.used_tokens + kept + capacity_tokens <= self.kv_tokens

    def find(self, live: LiveSequence) -> Prefix | None:
        """Return a prefix that a sequence has in common with a slot, or None if no full block is in common."""
        # The last token must be computed, because the next token is sampled from it.
        tokens = live.tokens[:-1]
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
        """Open a slot for a sequence, and close slots of ended sequences if capacity is lacking.

        Args:
            live: the sequence; `fits` must be true for its `wanted_tokens`.
            prefix: result of `find`, or None to copy nothing.

        Returns:
            (sequence to copy from, number of tokens to copy); (None, 0) if nothing can be copied.
        """
        source = prefix.sequence if prefix is not None and prefix.num_tokens >= BLOCK else None
        if source in self._cached:
            del self._cached[source]
            self._cached[source] = None  # now the most recently used
        capacity_tokens = live.wanted_tokens
        self._evict(capacity_tokens)
        self._entries[live.id] = _Entry(capacity_tokens, live.tokens, live.keys)
        self.used_tokens += capacity_tokens
        self.extend(live.id)
        if prefix is None or source not in self._entries:
            return None, 0
        if source in self._cached:
            self._copied.add(source)
        return source, prefix.num_tokens

    def grow(self, sequence: int, capacity_tokens: int) -> bool:
        """Enlarge a slot if the old and the new slot together fit into the KV capacity; return whether they fit."""
        if not self.fits(capacity_tokens):
            return False
        self._evict(capacity_tokens)
        entry = self._entries[sequence]
        self.used_tokens += capacity_tokens - entry.capacity_tokens
        entry.capacity_tokens = capacity_tokens
        return True

    def extend(self, sequence: int) -> None:
        """Add new full blocks of a sequence's known tokens to the prefix index."""
        entry = self._entries[sequence]
        if entry.indexed < len(entry.keys):
            self._index.add(sequence, entry.keys[entry.indexed :])
            entry.indexed = len(entry.keys)

    def write(self, sequence: int, stop: int) -> None:
        """Record that all positions before ``stop`` are written once the step being built has been computed."""
        self._entries[sequence].written = stop

    def retire(self, sequence: int) -> None:
        """Record that a sequence has ended, and keep its slot until the capacity is needed.

        A slot in which less than one full block is written is closed at once.
        """
        entry = self._entries[sequence]
        self.used_tokens -= entry.capacity_tokens
        self.cached_tokens += entry.capacity_tokens
        # After the end of a sequence, unreported tokens may have been fed back to positions after the known tokens.
        entry.tokens = entry.tokens[: entry.written]
        entry.written = len(entry.tokens)
        blocks = entry.written // BLOCK
        self._index.remove(sequence, entry.keys[blocks : entry.indexed])
        entry.keys, entry.indexed = entry.keys[:blocks], blocks
        self._cached[sequence] = None
        if not blocks:
            self._close(sequence)

    def forget(self, sequence: int) -> None:
        """Close the slot that `retire` kept for a sequence, if any. Call this before reusing the sequence's number."""
        if sequence in self._cached:
            self._close(sequence)

    def give_up(self, sequence: int) -> None:
        """Close the slot of a preempted sequence, which later continues in another slot."""
        self.retire(sequence)
        self.forget(sequence)

    def drop_cached(self) -> None:
        """Close all slots whose sequences have ended."""
        for sequence in list(self._cached):
            self._close(sequence)

    @property
    def has_closes(self) -> bool:
        """Whether the next engine step has slots to close."""
        return bool(self._closing)

    def take_closes(self) -> tuple[int, ...]:
        """Return the sequences whose slots the step being built must close; call this last for each step."""
        self._copied.clear()
        closes, self._closing = tuple(self._closing), []
        return closes

    def _evict(self, capacity_tokens: int) -> None:
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
