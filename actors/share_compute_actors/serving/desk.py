"""Where sequences are taken in and told of: the scheduler, safe for any thread, with what it says and measures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from share_compute.errors import ShareComputeError
from share_compute.serving.events import Emitted, Failed, SequenceEvent, Stats
from share_compute.serving.figures import Figures, Measured
from share_compute.serving.limits import Limits
from share_compute.serving.options import Generation
from share_compute.serving.scheduler import Scheduler
from share_compute.serving.turns import Turn, TurnResult
from share_compute_actors.serving.feed import Feed


class Desk:
    """All sequences of one replica of a deployment. They can be taken in before there are pools.

    Args:
        limits: of the scheduler, until there are pools.
        wake: is called when there may be turns to send.
    """

    def __init__(self, limits: Limits, wake: Callable[[], None]) -> None:
        self._scheduler = Scheduler(limits)
        self._wake = wake
        self._feed = Feed()
        self._lock = threading.Lock()
        self._figures = Figures()
        self._live: set[int] = set()
        """Sequences of which more will be told."""
        self._closed: ShareComputeError | None = None
        """Why no sequences are taken in."""

    # -- clients -----------------------------------------------------------------------------------------------------

    def submit(self, generations: Sequence[Generation]) -> None:
        """Take sequences in, all or none of them.

        Raises:
            TooLong: a prompt leaves no room for a token.
            Busy: too many wait already.
            UserError: they cannot be served as they are.
            Unavailable: nobody can serve them.
        """
        now_s = time.monotonic()
        with self._lock:
            if self._closed is not None:
                raise self._closed
            rate = self._figures.tokens_per_s(now_s)
            events = self._scheduler.submit(*generations, tokens_per_s=rate)
            self._live.update(generation.sequence for generation in generations)
            for generation in generations:
                self._figures.came(generation.sequence, now_s)
            self._tell(events)
        self._wake()

    def cancel(self, sequences: Iterable[int]) -> None:
        """End sequences that nobody wants any more."""
        with self._lock:
            for sequence in sequences:
                self._tell(self._scheduler.cancel(sequence))
        self._wake()

    def pull(self, after: int, timeout_s: float) -> list[SequenceEvent]:
        """Return what was told after the first ``after`` events; waits for more if there is nothing."""
        return self._feed.pull(after, timeout_s)

    # -- pools -------------------------------------------------------------------------------------------------------

    def next_turns(self) -> list[Turn]:
        """Return all turns that may be sent now."""
        with self._lock:
            turns = self._scheduler.next_turns()
            for turn in turns:
                self._figures.sent(len({chunk.sequence for chunk in turn.chunks}))
            return turns

    def completed(self, result: TurnResult) -> None:
        """Take in what came of a turn.

        Raises:
            VerificationFailed: it is not of what the turn samples.
        """
        with self._lock:
            self._tell(self._scheduler.completed(result))

    def reform(self, epoch: int, limits: Limits) -> None:
        """Go on with other pools."""
        with self._lock:
            self._tell(self._scheduler.reform(epoch, limits))

    def drop_cached(self) -> None:
        """Let pools free the caches that are kept of ended sequences."""
        with self._lock:
            self._scheduler.drop_cached()

    def fail(self, sequences: Iterable[int], error: ShareComputeError) -> None:
        """Give sequences up; what was emitted of them stays valid."""
        with self._lock:
            for sequence in self._live.intersection(sequences):
                self._scheduler.cancel(sequence)
                self._tell([Failed(sequence, error)])

    def close(self, error: ShareComputeError) -> None:
        """Give all sequences up, and take none in before `open`."""
        with self._lock:
            self._closed = error
            live = tuple(self._live)
        self.fail(live, error)

    def open(self) -> None:
        """Take sequences in again."""
        with self._lock:
            self._closed = None

    # -- what there is to know ---------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether sequences are taken in."""
        return self._closed is None

    def stats(self) -> Stats:
        """Return what is going on."""
        with self._lock:
            return self._scheduler.stats()

    def measured(self) -> Measured:
        """Return how soon tokens come, and how many."""
        with self._lock:
            return self._figures.measured(time.monotonic())

    def _tell(self, events: list[SequenceEvent]) -> None:
        self._figures.told(events, time.monotonic())
        self._live.difference_update(event.sequence for event in events if not isinstance(event, Emitted))
        self._feed.put(events)
