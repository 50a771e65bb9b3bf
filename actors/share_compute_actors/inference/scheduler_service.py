"""Scheduler service: a thread-safe interface to the scheduler, with its event queue and its metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from share_compute.errors import ShareComputeError
from share_compute.inference.scheduler.engine_steps import EngineStep, StepResult
from share_compute.inference.scheduler.events import Failed, SequenceEvent, Stats
from share_compute.inference.scheduler.figures import LatencyMeter, RecentFigures
from share_compute.inference.scheduler.limits import SchedulerLimits
from share_compute.inference.scheduler.options import Generation
from share_compute.inference.scheduler.scheduler import Scheduler
from share_compute_actors.group.event_feed import EventFeed


class SchedulerService:
    """Schedules the sequences of one replica. It accepts sequences even before there are stages.

    Args:
        limits: limits of the scheduler until there are stages.
        wake: called when there may be engine steps to send.
    """

    def __init__(self, limits: SchedulerLimits, wake: Callable[[], None]) -> None:
        self._scheduler = Scheduler(limits)
        self._wake = wake
        self._feed: EventFeed[SequenceEvent] = EventFeed()
        self._lock = threading.Lock()
        self._figures = LatencyMeter()
        self._closed: ShareComputeError | None = None
        """Error for new sequences while none are accepted; None while the service is open."""

    # -- clients -----------------------------------------------------------------------------------------------------

    def submit(self, generations: Sequence[Generation]) -> None:
        """Accept sequences, either all or none of them.

        Raises:
            TooLong: a prompt leaves no space in the window for an answer, or a text to embed is too long.
            Busy: too many sequences are already waiting.
            UserError: the sequences cannot be served as they are.
            ShareComputeError: the service is closed; the error is that given to `close`.
        """
        now_s = time.monotonic()
        with self._lock:
            if self._closed is not None:
                raise self._closed
            rate = self._figures.tokens_per_s(now_s)
            events = self._scheduler.submit(*generations, tokens_per_s=rate)
            for generation in generations:
                self._figures.came(generation.sequence, now_s)
            self._report(events)
        self._wake()

    def cancel(self, sequences: Iterable[int]) -> None:
        """End sequences that are no longer wanted."""
        with self._lock:
            for sequence in sequences:
                self._report(self._scheduler.cancel(sequence))
        self._wake()

    def pull(self, after: int, timeout_s: float) -> list[SequenceEvent]:
        """Return all events except the first ``after`` ones; see `EventFeed.pull`."""
        return self._feed.pull(after, timeout_s)

    # -- stages ------------------------------------------------------------------------------------------------------

    def next_steps(self) -> list[EngineStep]:
        """Return all engine steps that may be sent now; the caller must send them in this order."""
        with self._lock:
            steps = self._scheduler.next_steps()
            for step in steps:
                self._figures.sent(len({chunk.sequence for chunk in step.chunks}))
            return steps

    def completed(self, result: StepResult) -> None:
        """Process the result of an engine step.

        Raises:
            VerificationFailed: the result does not fit the sequences that the engine step samples.
        """
        with self._lock:
            self._report(self._scheduler.completed(result))

    def reform(self, epoch: int, limits: SchedulerLimits) -> None:
        """Continue the sequences on the stages of a new epoch; sequences that are too long for the new stages fail."""
        with self._lock:
            self._report(self._scheduler.reform(epoch, limits))

    def drop_cached(self) -> None:
        """Make the next engine step free the KV slots of ended sequences, which served as a prefix cache."""
        with self._lock:
            self._scheduler.drop_cached()

    def fail(self, sequences: Iterable[int], error: ShareComputeError) -> None:
        """Fail the given sequences, except those that have already ended."""
        with self._lock:
            for sequence in sequences:
                if self._scheduler.cancel(sequence):
                    self._report([Failed(sequence, error)])

    def close(self, error: ShareComputeError) -> None:
        """Fail all sequences, and accept none until `open` is called."""
        with self._lock:
            self._closed = error
            live = self._scheduler.live
        self.fail(live, error)

    def open(self) -> None:
        """Accept sequences again."""
        with self._lock:
            self._closed = None

    # -- metrics -----------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether sequences are accepted."""
        return self._closed is None

    def stats(self) -> Stats:
        """Return the scheduler's current counts."""
        with self._lock:
            return self._scheduler.stats()

    def measured(self) -> RecentFigures:
        """Return recent latency, throughput and batch size."""
        with self._lock:
            return self._figures.measured(time.monotonic())

    def _report(self, events: list[SequenceEvent]) -> None:
        self._figures.record_events(events, time.monotonic())
        self._feed.put(events)
