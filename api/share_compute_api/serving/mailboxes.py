"""What an engine tells of its sequences, sorted into streams: one for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from share_compute.errors import ShareComputeError, Unavailable
from share_compute.serving.events import Embedded, Emitted, Failed, Finished, SequenceEvent


class Mailboxes:
    """The streams of one engine; all calls come from the event loop's thread.

    Args:
        cancel: is called with a sequence whose stream was closed before it ended, and whether its reader has all that
            it wants.
    """

    def __init__(self, cancel: Callable[[int, bool], None]) -> None:
        self._cancel = cancel
        self._boxes: dict[int, asyncio.Queue[SequenceEvent]] = {}

    def open(self, sequences: Iterable[int]) -> list[Mailbox]:
        """Return a stream for each sequence; do so before the engine can tell anything of it."""
        return [self._open(sequence) for sequence in sequences]

    def _open(self, sequence: int) -> Mailbox:
        box: asyncio.Queue[SequenceEvent] = asyncio.Queue()
        self._boxes[sequence] = box
        return Mailbox(box, partial(self._close, sequence))

    def deliver(self, events: Iterable[SequenceEvent]) -> None:
        """Put events into their streams; those that nobody reads any more are dropped."""
        for event in events:
            over = not isinstance(event, Emitted)
            box = self._boxes.pop(event.sequence, None) if over else self._boxes.get(event.sequence)
            if box is not None:
                box.put_nowait(event)

    def fail(self, error: ShareComputeError, sequences: Sequence[int] | None = None) -> None:
        """End streams by an error: those of some sequences, or all."""
        self.deliver([Failed(sequence, error) for sequence in sequences or tuple(self._boxes)])

    def discard(self, sequences: Iterable[int]) -> None:
        """Forget sequences that the engine did not take in."""
        for sequence in sequences:
            self._boxes.pop(sequence, None)

    def _close(self, sequence: int, is_complete: bool) -> None:
        if self._boxes.pop(sequence, None) is not None:
            self._cancel(sequence, is_complete)


class Mailbox:
    """What is told of one sequence: a stream, or a vector.

    Args:
        box: gets it.
        close: is called when nobody wants more of it, with whether all that was wanted was told.
    """

    def __init__(self, box: asyncio.Queue[SequenceEvent], close: Callable[[bool], None]) -> None:
        self._box = box
        self._close = close
        self._is_over = False

    def __aiter__(self) -> Mailbox:
        """Return itself."""
        return self

    async def __anext__(self) -> Emitted | Finished:
        """Return the next token, or how the sequence ended."""
        if self._is_over:
            raise StopAsyncIteration
        event = await self._next()
        assert not isinstance(event, Embedded), "a text that became a vector has no tokens"
        return event

    async def vector(self) -> bytes:
        """Return what a text became: 32-bit floats, little-endian.

        Raises:
            ShareComputeError: it cannot become any.
        """
        event = await self._next()
        if not isinstance(event, Embedded):
            raise Unavailable("the text was given up", mend="send it again")
        return event.vector

    async def _next(self) -> Emitted | Embedded | Finished:
        event = await self._box.get()
        self._is_over = not isinstance(event, Emitted)
        if isinstance(event, Failed):
            raise event.error
        return event

    async def aclose(self, *, is_complete: bool = False) -> None:
        """Cancel the sequence, if it has not ended; see `Stream.aclose`."""
        self._is_over = True
        self._close(is_complete)
