"""Decode batches of about equal size, so that all stages work at the same time.

A sequence that moves to another batch joins that batch only when it has no token in flight. Otherwise the next step of
the new batch might wait for that token.
"""

from __future__ import annotations

from collections.abc import Iterator

from share_compute.inference.scheduler.live_sequence import LiveSequence


class Batches:
    """The decode batches of one epoch.

    Args:
        count: number of batches.
        depth: maximum number of engine steps of one batch in flight.
    """

    def __init__(self, count: int, depth: int) -> None:
        self._members: list[dict[int, LiveSequence]] = [{} for _ in range(count)]
        self._in_flight = [0] * count
        self._depth = depth
        self._next = 0
        self._moving: dict[int, LiveSequence] = {}

    def free(self) -> Iterator[int]:
        """Yield the batches that may send an engine step now, each once, in round-robin order."""
        count = len(self._members)
        first = self._next
        for batch in (*range(first, count), *range(first)):
            if self._in_flight[batch] < self._depth:
                yield batch

    def sent(self, batch: int) -> None:
        """Record that an engine step of a batch was sent."""
        self._in_flight[batch] += 1
        self._next = (batch + 1) % len(self._members)

    def passed(self, batch: int) -> None:
        """Record that an engine step of a batch has passed all stages."""
        self._in_flight[batch] -= 1

    def members(self, batch: int) -> list[LiveSequence]:
        """Return the sequences that decode in a batch, those that waited longest first."""
        return sorted(self._members[batch].values(), key=lambda live: (live.last_step, live.order))

    def join(self, live: LiveSequence, batch: int) -> None:
        """Add a sequence that starts to decode.

        If ``batch`` already has its share of the sequences, `balance` adds the sequence to the smallest batch later.

        Args:
            live: the sequence.
            batch: batch of the engine step that computes the end of the sequence's prompt.
        """
        everyone = sum(map(len, self._members)) + len(self._moving) + 1
        if len(self._members[batch]) * len(self._members) < everyone:
            self._put(live, batch)
        else:
            self._moving[live.id] = live

    def leave(self, live: LiveSequence) -> None:
        """Take a sequence out of its batch."""
        self._moving.pop(live.id, None)
        if live.batch is not None:
            del self._members[live.batch][live.id]
            live.batch = None

    def balance(self) -> None:
        """Move sequences from large batches to small ones.

        A sequence with a token in flight leaves its batch, and joins the new one in a later call.
        """
        sizes = [len(members) for members in self._members]
        while max(sizes) - min(sizes) - len(self._moving) > 1:
            live = next(reversed(self._members[sizes.index(max(sizes))].values()))
            sizes[sizes.index(max(sizes))] -= 1
            self.leave(live)
            self._moving[live.id] = live
        for live in [live for live in self._moving.values() if live.is_settled]:
            del self._moving[live.id]
            self._put(live, sizes.index(min(sizes)))
            sizes[sizes.index(min(sizes))] += 1

    def _put(self, live: LiveSequence, batch: int) -> None:
        live.batch = batch
        self._members[batch][live.id] = live
