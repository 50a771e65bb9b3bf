"""Which sequences decode together: as many batches as pools, of about the same size, so that no pool waits.

A sequence stays in its batch: the batch's next turn comes a whole round after the last one, when the token that it is
to be fed back is there. One that changes its batch, so that all have the same size, first waits until no token of it
is on its way: else the turn of the other batch, and with it the first pool, might have to wait for that token.
"""

from __future__ import annotations

from collections.abc import Iterator

from share_compute.serving.live_sequence import LiveSequence


class Batches:
    """The batches of one epoch.

    Args:
        count: how many.
        depth: most turns of one batch that are in flight.
    """

    def __init__(self, count: int, depth: int) -> None:
        self._members: list[dict[int, LiveSequence]] = [{} for _ in range(count)]
        self._in_flight = [0] * count
        self._depth = depth
        self._next = 0
        self._moving: dict[int, LiveSequence] = {}

    def free(self) -> Iterator[int]:
        """Yield the batches that may send a turn now, each once, in turn."""
        count = len(self._members)
        first = self._next
        for batch in (*range(first, count), *range(first)):
            if self._in_flight[batch] < self._depth:
                yield batch

    def sent(self, batch: int) -> None:
        """Take note that a turn of a batch was sent."""
        self._in_flight[batch] += 1
        self._next = (batch + 1) % len(self._members)

    def passed(self, batch: int) -> None:
        """Take note that a turn of a batch has passed all pools."""
        self._in_flight[batch] -= 1

    def members(self, batch: int) -> list[LiveSequence]:
        """Return those that decode in a batch, who has waited longest first."""
        return sorted(self._members[batch].values(), key=lambda live: (live.last_turn, live.order))

    def join(self, live: LiveSequence, batch: int) -> None:
        """Let a sequence decode from now on: in the batch whose turn has the last of its prompt, if it is not full."""
        everyone = sum(map(len, self._members)) + len(self._moving) + 1
        if len(self._members[batch]) * len(self._members) < everyone:
            self._put(live, batch)
        else:
            self._moving[live.id] = live

    def leave(self, live: LiveSequence) -> None:
        """Let a sequence decode no more."""
        self._moving.pop(live.id, None)
        if live.batch is not None:
            del self._members[live.batch][live.id]
            live.batch = None

    def balance(self) -> None:
        """Make the sizes even: those of which no token is on its way join the smallest batch."""
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
