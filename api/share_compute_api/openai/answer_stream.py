"""Streams an answer as server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from share_compute.errors import ShareComputeError, Unavailable
from share_compute_api.connection import sse
from share_compute_api.connection.departures import departure
from share_compute_api.connection.notifier import Notifier
from share_compute_api.openai.answers import Shape
from share_compute_api.openai.completion import Completion

STREAM_ID = "X-Stream-Id"
"""Header with the id of a resumable stream."""
UNREAD_S = 60.0
"""Seconds that a client may take to accept one part of the answer, before its request is cancelled."""
_log = logging.getLogger(__name__)


def encoded(chunks: Iterable[Mapping[str, Any]], shape: Shape) -> bytes:
    """Return the events of chunks."""
    return b"".join(
        sse.json_event(chunk, kind=chunk["type"] if shape.has_kinds else None) for chunk in chunks
    )


def failed(failure: Exception, shape: Shape) -> bytes:
    """Return the events that end a stream after a failure: the error, then ``[DONE]`` if the route has it."""
    return encoded(shape.failed(failure), shape) + _end(shape)


def _end(shape: Shape) -> bytes:
    return b"" if shape.has_kinds else sse.event("[DONE]")


async def answer_events(completion: Completion, shape: Shape) -> AsyncGenerator[bytes, None]:
    """Yield the server-sent events of an answer.

    Args:
        completion: the generated sequences of the request.
        shape: builds the chunks.
    """
    yield b"".join(encoded(shape.first(index), shape) for index in range(completion.num_sequences))
    try:
        async for batch in completion.pieces(quiet_s=sse.KEEPALIVE_S):
            yield (
                b"".join(encoded(shape.chunks(index, piece), shape) for index, piece in batch)
                or sse.KEEPALIVE
            )
    except ShareComputeError as failure:
        yield failed(failure, shape)
        return
    yield encoded(shape.last(completion.usage), shape) + _end(shape)


class AnswerStream(Response):
    """Response that sends events as they arrive, and calls ``close`` at the end.

    Args:
        events: yields encoded events, one or several at a time.
        notifier: signals that the server is shutting down.
        close: cancels the sequences that produce the events.
        shape: builds the chunk for an error.
        stream_id: id of the stream if it is resumable. Such a stream ends without ``[DONE]`` when the server shuts
            down, so that its client continues it.
    """

    media_type = sse.MEDIA_TYPE

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        notifier: Notifier,
        close: Callable[[], None],
        shape: Shape,
        *,
        stream_id: str | None = None,
    ) -> None:
        super().__init__(headers=sse.HEADERS)
        if stream_id is not None:
            self.headers[STREAM_ID] = stream_id
        self._is_resumable = stream_id is not None
        del self.headers["content-length"]
        self._events = events
        self._notifier = notifier
        self._close = close
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events; stop early if the client disconnects or reads nothing, or if the server shuts down."""
        del scope
        work = asyncio.ensure_future(self._send_all(send))
        watch = asyncio.ensure_future(departure(receive, self._notifier))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
            elif await watch == "ending":
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                ending = Unavailable("the server ends", hint="ask again in a while")
                await _body(send, b"" if self._is_resumable else failed(ending, self._shape), more=False)
        except TimeoutError:
            _log.info("a client read nothing for %g s: its request is cancelled", UNREAD_S)
        finally:
            work.cancel()
            watch.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)
            await self._events.aclose()
            self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for content in self._events:
            async with asyncio.timeout(UNREAD_S):
                await _body(send, content, more=True)
        await _body(send, b"", more=False)


async def _body(send: Send, content: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": content, "more_body": more})
