"""Sorts an engine's events into streams, one for each sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from share_compute.errors import ShareComputeError, Unavailable
from share_compute.serving.events import Embedded, Emitted, Failed, Finished, SequenceEvent


class Mailboxes:
    """The streams of one engine; all calls come from the event loop's thread.

    Args:
        cancel: called with a sequence whose stream was closed before its end, and whether its reader has all that it
            wants.
    """

    def __init__(self, cancel: Callable[[int, bool], None]) -> None:
        self._cancel = cancel
        self._boxes: dict[int, asyncio.Queue[SequenceEvent]] = {}

    def open(self, sequences: Iterable[int]) -> list[Mailbox]:
        """Return a stream for each sequence; call this before the engine can report events of them."""
        return [self._open(sequence) for sequence in sequences]

    def _open(self, sequence: int) -> Mailbox:
        box: asyncio.Queue[SequenceEvent] = asyncio.Queue()
        self._boxes[sequence] = box
        return Mailbox(box, partial(self._close, sequence))

    def deliver(self, events: Iterable[SequenceEvent]) -> None:
        """Put events into their streams; drop events of streams that were closed."""
        for event in events:
            over = not isinstance(event, Emitted)
            box = self._boxes.pop(event.sequence, None) if over else self._boxes.get(event.sequence)
            if box is not None:
                box.put_nowait(event)

    def fail(self, error: ShareComputeError, sequences: Sequence[int] | None = None) -> None:
        """End streams with an error: those of the given sequences, or all."""
        self.deliver([Failed(sequence, error) for sequence in sequences or tuple(self._boxes)])

    def discard(self, sequences: Iterable[int]) -> None:
        """Forget sequences that the engine did not accept."""
        for sequence in sequences:
            self._boxes.pop(sequence, None)

    def _close(self, sequence: int, is_complete: bool) -> None:
        if self._boxes.pop(sequence, None) is not None:
            self._cancel(sequence, is_complete)


class Mailbox:
    """The events of one sequence: a stream of tokens, or a vector.

    Args:
        box: queue that gets the events.
        close: called when the reader wants no more, with whether the reader got all that it wanted.
    """

    def __init__(self, box: asyncio.Queue[SequenceEvent], close: Callable[[bool], None]) -> None:
        self._box = box
        self._close = close
        self._is_over = False

    def __aiter__(self) -> Mailbox:
        """Return the mailbox itself."""
        return self

    async def __anext__(self) -> Emitted | Finished:
        """Return the next token, or the end of the sequence."""
        if self._is_over:
            raise StopAsyncIteration
        event = await self._next()
        assert not isinstance(event, Embedded), "a text that became a vector has no tokens"
        return event

    async def vector(self) -> bytes:
        """Return the vector of a text: 32-bit floats, little-endian.

        Raises:
            ShareComputeError: the text cannot be turned into a vector.
        """
        event = await self._next()
        if not isinstance(event, Embedded):
            raise Unavailable("the text was given up", hint="send it again")
        return event.vector

    async def _next(self) -> Emitted | Embedded | Finished:
        event = await self._box.get()
        self._is_over = not isinstance(event, Emitted)
        if isinstance(event, Failed):
            raise event.error
        return event

    async def aclose(self, *, is_complete: bool = False) -> None:
        """Cancel the sequence if it has not ended; see `Stream.aclose`."""
        self._is_over = True
        self._close(is_complete)
