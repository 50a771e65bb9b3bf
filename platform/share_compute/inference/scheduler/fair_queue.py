"""Fair queueing: owners (API keys) share a replica evenly, by tokens.

Each owner has a counter of the positions computed for it; the owner with the lowest counter is next. A returning owner
starts at the lowest counter among owners with sequences, or at its own counter if that is higher. All counters are
cleared when no sequence is left. Source: the virtual token counter of Sheng et al., Fairness in Serving Large Language
Models, 2024.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from share_compute.inference.scheduler.live_sequence import LiveSequence


@dataclass(slots=True, eq=False)
class OwnerQueue:
    """An owner's sequences and its token counter."""

    served_tokens: int = 0
    """Number of positions charged to the owner, or more after the owner returned; see the module docstring."""
    waiting: deque[LiveSequence] = field(default_factory=deque)
    """Sequences that have not started."""
    interrupted: deque[LiveSequence] = field(default_factory=deque)
    """Sequences that started, but whose KV slots were lost or given up; in order of arrival."""
    prefilling: dict[int, LiveSequence] = field(default_factory=dict)
    """Started sequences with known tokens that have not been sent to the stages, by sequence id."""
    num_live: int = 0
    """Number of sequences that have not ended."""


class FairQueue:
    """Queue of all sequences that have not ended, ordered by the counters of their owners."""

    def __init__(self) -> None:
        self._owners: dict[str, OwnerQueue] = {}
        self.num_waiting = 0
        """Number of sequences that have never started."""
        self.num_interrupted = 0
        self.num_prefilling = 0

    def add(self, live: LiveSequence) -> None:
        """Put a new sequence behind the waiting sequences of its owner."""
        owner = self._arrived(live.owner)
        owner.num_live += 1
        owner.waiting.append(live)
        self.num_waiting += 1

    def interrupt(self, sequences: Iterable[LiveSequence]) -> None:
        """Put running sequences back into the queue, ahead of sequences that have never started.

        The caller must call `LiveSequence.close` for each of them afterwards.
        """
        for live in sequences:
            owner = self._owners[live.owner]
            if owner.prefilling.pop(live.id, None):
                self.num_prefilling -= 1
            owner.interrupted.append(live)
            self.num_interrupted += 1
        for owner in self._owners.values():
            owner.interrupted = deque(sorted(owner.interrupted, key=lambda live: live.order))

    def begin(self, live: LiveSequence) -> None:
        """Move a waiting or interrupted sequence to `OwnerQueue.prefilling`."""
        owner = self._owners[live.owner]
        self._take_out(owner, live)
        owner.prefilling[live.id] = live
        self.num_prefilling += 1

    def prefilled(self, live: LiveSequence) -> None:
        """Record that all known tokens of a sequence have been sent."""
        del self._owners[live.owner].prefilling[live.id]
        self.num_prefilling -= 1

    def end(self, live: LiveSequence) -> None:
        """Remove a sequence that has ended, whether it waits or runs."""
        owner = self._owners[live.owner]
        if not live.is_open:
            self._take_out(owner, live)
        elif owner.prefilling.pop(live.id, None):
            self.num_prefilling -= 1
        owner.num_live -= 1
        if not any(one.num_live for one in self._owners.values()):
            self._owners.clear()

    def charge(self, live: LiveSequence) -> None:
        """Charge the owner of a sequence for the positions that were sent since the last charge."""
        self._owners[live.owner].served_tokens += live.charge()

    def in_turn(self) -> list[OwnerQueue]:
        """Return the owners with a sequence to start or to prefill, the next owner first."""
        return sorted(
            (owner for owner in self._owners.values() if owner.prefilling or self.candidates(owner)),
            key=lambda owner: (owner.served_tokens, self._oldest(owner)),
        )

    def candidates(self, owner: OwnerQueue) -> deque[LiveSequence]:
        """Return an owner's sequences that may start: interrupted ones while any owner has some, else waiting ones."""
        return owner.interrupted if self.num_interrupted else owner.waiting

    def queued(self) -> Iterator[LiveSequence]:
        """Return an iterator over all sequences that wait to start or to continue."""
        return chain.from_iterable(chain(owner.interrupted, owner.waiting) for owner in self._owners.values())

    def num_waiting_of(self, owner: str) -> int:
        """Return the number of an owner's sequences that have never started."""
        return len(self._owners[owner].waiting) if owner in self._owners else 0

    @property
    def num_owners(self) -> int:
        """Number of owners with a sequence that has not ended."""
        return sum(owner.num_live > 0 for owner in self._owners.values())

    def _oldest(self, owner: OwnerQueue) -> int:
        first = next(iter(owner.prefilling.values()), None) or self.candidates(owner)[0]
        return first.order

    def _take_out(self, owner: OwnerQueue, live: LiveSequence) -> None:
        if live in owner.interrupted:
            owner.interrupted.remove(live)
            self.num_interrupted -= 1
        else:
            owner.waiting.remove(live)
            self.num_waiting -= 1

    def _arrived(self, name: str) -> OwnerQueue:
        owner = self._owners.setdefault(name, OwnerQueue())
        if not owner.num_live:
            there = [one.served_tokens for one in self._owners.values() if one.num_live]
            least = min(there, default=0)
            owner.served_tokens = max(owner.served_tokens, least)
            # A returning owner starts at ``least`` or higher: counters of absent owners up to ``least`` are dropped.
            self._owners = {
                key: one
                for key, one in self._owners.items()
                if one is owner or one.num_live or one.served_tokens > least
            }
        return owner
