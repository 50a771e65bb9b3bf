"""Tracks the live sequences of a deployment, so that another replica can continue them when their replica is lost.

`SequenceRecovery` has the table of these sequences, each with its replica and its emitted tokens. It accepts a token
only from the sequence's replica and with the next index, so that clients get each token once. A sequence whose replica
is lost waits until the engine submits it to another replica, together with its emitted tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from share_compute.errors import ContributorLost, ShareComputeError, Unavailable
from share_compute.inference.scheduler.events import Emitted, Failed, SequenceEvent
from share_compute.inference.scheduler.options import Generation
from share_compute_api.openai.engine import StreamEvent
from share_compute_api.openai.metering import Meter
from share_compute_api.openai.replica import Replica
from share_compute_api.openai.routing import Router

_PULL_S = 10.0
"""Longest wait for a replica's next events, in seconds."""
RETRY_S = 0.5
"""Pause before a replica is asked again after an error, in seconds."""
_log = logging.getLogger(__name__)


class RequestStream:
    """The events of one request's sequences, in order of arrival; see `engine.Stream`.

    Args:
        sequences: numbers of the sequences.
        cancel: called with (sequence number, whether the answer is complete) when the reader ends a sequence early.
    """

    def __init__(self, sequences: Iterable[int], cancel: Callable[[int, bool], None]) -> None:
        self._open = set(sequences)
        """Numbers of the sequences that have not ended."""
        self._cancel = cancel
        self._events: list[SequenceEvent] = []
        """Events that the reader has not read yet."""
        self._news = asyncio.Event()

    def put(self, event: SequenceEvent) -> None:
        """Add an event; ignore the event if its sequence has ended."""
        if event.sequence not in self._open:
            return
        if not isinstance(event, Emitted):
            self._open.discard(event.sequence)
        self._events.append(event)
        self._news.set()

    def __aiter__(self) -> Self:
        """Return the stream itself."""
        return self

    async def __anext__(self) -> list[StreamEvent]:
        """Wait for events and return all that have arrived; a failure is raised after all earlier events."""
        while not self._events:
            if not self._open:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        events: list[StreamEvent] = []
        for place, event in enumerate(self._events):
            if isinstance(event, Failed):
                self._events = self._events[place if events else place + 1 :]
                if events:
                    return events
                raise event.error
            events.append(event)
        self._events = []
        return events

    def complete(self, sequence: int) -> None:
        """Stop a sequence whose text is complete, for example at a stop string; do nothing if it has ended."""
        self._end(sequence, is_complete=True)

    def close(self) -> None:
        """Cancel all sequences that have not ended."""
        for sequence in tuple(self._open):
            self._end(sequence, is_complete=False)

    def _end(self, sequence: int, *, is_complete: bool) -> None:
        if sequence in self._open:
            self._open.discard(sequence)
            self._cancel(sequence, is_complete)


@dataclass(slots=True)
class Resumable:
    """A live sequence, with the data that another replica needs to continue it."""

    generation: Generation
    stream: RequestStream
    came_s: float
    emitted: list[int]
    """Tokens that were generated so far, including those before this request."""
    last_token_s: float | None = None
    """Time at which the sequence's last token arrived, in seconds of the event loop's clock; None before the first."""
    replica: Replica | None = None
    """Replica that runs the sequence or is asked to accept it; None while the sequence waits for a replica."""
    is_placing: bool = True
    """Whether a task is submitting the sequence; meanwhile no other task submits it or cancels it at a replica."""
    waiting_since_s: float = 0.0
    """Start of the wait for a replica, in seconds on the event loop's clock.

    A wait that times out while replicas are ready starts again.
    """

    @property
    def waits(self) -> bool:
        """Whether the sequence has no replica and no task is submitting it."""
        return self.replica is None and not self.is_placing

    def rest(self) -> Generation:
        """Return the generation to submit next: the original generation with the tokens emitted so far."""
        return self.generation.model_copy(update={"emitted": tuple(self.emitted)})


class SequenceRecovery:
    """Table of a deployment's live sequences; all methods must be called in the event loop's thread.

    Args:
        name: name of the deployment.
        router: the replicas.
        meter: records token latencies and ends of sequences.
        freed: called when sequences have been taken from their replica and wait for another replica.
    """

    def __init__(self, name: str, router: Router, meter: Meter, freed: Callable[[], None]) -> None:
        self._name = name
        self._router = router
        self._meter = meter
        self._freed = freed
        self._live: dict[int, Resumable] = {}
        self.idle_since_s = now_s()
        """Time from which an empty table counts as idle, in seconds on the event loop's clock."""

    # -- the table ---------------------------------------------------------------------------------------------------

    def add(self, generations: Sequence[Generation], stream: RequestStream) -> list[Resumable]:
        """Add the sequences of one request to the table; the caller must submit them to a replica."""
        time_s = now_s()
        added = [
            Resumable(generation, stream, time_s, list(generation.emitted), waiting_since_s=time_s)
            for generation in generations
        ]
        self._live.update((live.generation.sequence, live) for live in added)
        return added

    def has(self, live: Resumable) -> bool:
        """Return whether a sequence is still in the table."""
        return self._live.get(live.generation.sequence) is live

    def of(self, replica: Replica | None) -> list[Resumable]:
        """Return the sequences of a replica, running and queued; for None, the sequences without a replica."""
        return [live for live in self._live.values() if live.replica is replica]

    @property
    def waiting(self) -> list[Resumable]:
        """The sequences that wait for a replica, in order of arrival."""
        return [live for live in self._live.values() if live.waits]

    @property
    def is_empty(self) -> bool:
        """Whether the table is empty."""
        return not self._live

    def counts(self) -> tuple[list[int], int]:
        """Return the number of sequences of each replica, and the number of sequences without a replica."""
        counts = dict.fromkeys(self._router, 0)
        waiting = 0
        for live in self._live.values():
            if live.replica is None:
                waiting += 1
            else:
                counts[live.replica] = counts.get(live.replica, 0) + 1
        return list(counts.values()), waiting

    def forget(self, sequence: int) -> Resumable | None:
        """Remove a sequence from the table and return it; return None if it is not in the table."""
        live = self._live.pop(sequence, None)
        if live is not None and not self._live:
            self.idle_since_s = now_s()
        return live

    def cancelled(self, sequence: int, *, is_complete: bool) -> Resumable | None:
        """Remove a sequence that its reader ended, and return it; return None if it had ended before."""
        live = self.forget(sequence)
        if live is not None:
            self._meter.ended("stop" if is_complete else "abort", now_s() - live.came_s)
        return live

    def fail(self, live: Resumable, error: ShareComputeError) -> None:
        """End a sequence with an error."""
        sequence = live.generation.sequence
        if self.forget(sequence) is not None:
            self._meter.ended("error", now_s() - live.came_s)
            live.stream.put(Failed(sequence, error))

    def close(self, error: ShareComputeError) -> None:
        """End all sequences with an error."""
        ended, self._live = self._live, {}
        for sequence, live in ended.items():
            live.stream.put(Failed(sequence, error))

    # -- events of replicas ------------------------------------------------------------------------------------------

    async def listen(self, replica: Replica) -> None:
        """Process a replica's events until the replica is lost; the caller must then `free` the replica's sequences."""
        received = 0
        while True:
            try:
                events = await replica.pull(received, _PULL_S)
            except ContributorLost as failure:
                _log.warning("%s: %s", self._name, failure.message)
                return
            except ShareComputeError as failure:
                _log.warning("%s: %s", self._name, failure.message)
                await asyncio.sleep(RETRY_S)
            else:
                received += len(events)
                self._take(replica, events)

    def _take(self, replica: Replica, events: Sequence[SequenceEvent]) -> None:
        """Pass events to their readers, and free sequences that the replica gave up; skip outdated events."""
        given_up: list[Resumable] = []
        time_s = now_s()
        for event in events:
            live = self._live.get(event.sequence)
            if live is None or live.replica is not replica:
                continue
            if isinstance(event, Emitted):
                if event.index != len(live.emitted):
                    continue
                self._note_token(live, event, time_s)
                live.emitted.append(event.token)
            elif self._may_continue(replica, event):
                given_up.append(live)
                continue
            else:
                self.forget(event.sequence)
                self._meter.finished(event, time_s - live.came_s)
            live.stream.put(event)
        self.free(given_up)

    def _may_continue(self, replica: Replica, event: SequenceEvent) -> bool:
        """Return whether a sequence may move: its replica gave it up, and another replica accepts new requests."""
        is_given_up = isinstance(event, Failed) and isinstance(event.error, Unavailable)
        return is_given_up and any(taker is not replica for taker in self._router.takers)

    def _note_token(self, live: Resumable, event: Emitted, time_s: float) -> None:
        if live.last_token_s is not None:
            self._meter.next_token(time_s - live.last_token_s)
        else:
            self._meter.first_token(time_s - live.came_s, event.cached_tokens)
        live.last_token_s = time_s

    def free(self, sequences: Sequence[Resumable]) -> None:
        """Unassign sequences from their replica, so that they wait for another replica."""
        time_s = now_s()
        for live in sequences:
            live.replica, live.waiting_since_s = None, time_s
        if sequences:
            self._freed()


def now_s() -> float:
    """Return the time of the event loop's clock, in seconds."""
    return asyncio.get_running_loop().time()
