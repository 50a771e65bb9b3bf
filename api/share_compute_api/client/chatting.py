"""Client of the OpenAI API of served models; converts the API's errors to `ShareComputeError`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Literal
from urllib.parse import quote

import httpx
from httpx_sse import EventSource, connect_sse

from share_compute.errors import (
    Busy,
    Gone,
    NotAuthorized,
    NotFound,
    ShareComputeError,
    Unavailable,
    UserError,
)
from share_compute_api.connection.backoff import ExponentialBackoff
from share_compute_api.connection.transport import Transport

_READ_TIMEOUT_S = 60.0
"""Read timeout of a stream, in seconds; the server sends a keep-alive after 10 s without an event."""
_CANCEL_TIMEOUT_S = 5.0
RESUME_S = 120.0
"""Default of ``resume_s``, in seconds."""
_PAUSES_S = (0.1, 1.0)
"""First and longest delay before a stream is resumed, in seconds."""
RESUMABLE = "X-Resumable"
STREAM_ID = "X-Stream-Id"
_PASSING = frozenset(
    {
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    }
)
"""Statuses after which a stream may be resumed: the server starts, or its model does not answer yet."""
_DONE = "[DONE]"
_KINDS: dict[int, type[ShareComputeError]] = {
    HTTPStatus.UNAUTHORIZED: NotAuthorized,
    HTTPStatus.NOT_FOUND: NotFound,
    HTTPStatus.GONE: Gone,
    HTTPStatus.TOO_MANY_REQUESTS: Busy,
    HTTPStatus.SERVICE_UNAVAILABLE: Unavailable,
}


def require_model(transport: Transport, name: str) -> dict[str, Any]:
    """Return a model's entry in ``/v1/models``; raise the server's error if the model is not available."""
    with transport.translated():
        answer = transport.http.get(f"{transport.target.url}/v1/models/{quote(name, safe='')}")
    _raise_for_error(answer)
    facts: dict[str, Any] = answer.json()
    return facts


def stream(
    transport: Transport,
    route: Literal["chat/completions", "completions"],
    request: dict[str, Any],
    *,
    resume_s: float = RESUME_S,
) -> Iterator[str]:
    """Yield the text of an answer in pieces, as it arrives.

    If the connection breaks or the server restarts, the client resumes the stream after its last event. Closing the
    iterator cancels the request.

    Args:
        transport: connection to the server.
        route: route below ``/v1``.
        request: body of the request, without ``stream``.
        resume_s: seconds for which the client tries to resume a broken stream; 0 never resumes.

    Raises:
        ShareComputeError: the server reported an error, or could not be reached.
    """
    answer = _Answer(transport, resume_s)
    try:
        yield from answer.pieces(route, request)
    except ShareComputeError:
        raise
    except BaseException:  # the caller closed the iterator, or Ctrl-C was pressed
        answer.cancel()
        raise


class _Answer:
    """One streamed answer, over all its connections."""

    def __init__(self, transport: Transport, resume_s: float) -> None:
        self._transport = transport
        self._resume_s = resume_s
        self._id: str | None = None
        """Id of the stream; None if the stream cannot be resumed."""
        self._last_event_id = ""
        self._is_done = False
        self._broken_since_s: float | None = None
        """Time at which the stream broke, on the monotonic clock; None while events arrive."""
        self._backoff = ExponentialBackoff(*_PAUSES_S, has_jitter=True)

    def pieces(self, route: str, request: dict[str, Any]) -> Iterator[str]:
        yield from self._read("POST", route, json={**request, "stream": True}, headers={RESUMABLE: "true"})
        while not self._is_done:
            time.sleep(self._backoff.failed())
            given = {"Last-Event-ID": self._last_event_id} if self._last_event_id else {}
            yield from self._read("GET", f"streams/{self._id}", headers=given)

    def _read(self, method: str, route: str, **options: Any) -> Iterator[str]:
        """Yield the text of one connection; return without an error if the stream broke and may be resumed."""
        url = f"{self._transport.target.url}/v1/{route}"
        timeout = httpx.Timeout(30.0, read=_READ_TIMEOUT_S)
        source: EventSource
        try:
            with connect_sse(self._transport.http, method, url, timeout=timeout, **options) as source:
                if self._id is not None and source.response.status_code in _PASSING:
                    self._require_time(f"it answers {source.response.status_code}")
                    return
                _raise_for_error(source.response)
                self._id = source.response.headers.get(STREAM_ID)
                for item in source.iter_sse():
                    self._broken_since_s = None
                    self._backoff.reset()
                    self._last_event_id = item.id
                    if item.data == _DONE:
                        self._is_done = True
                        return
                    if item.data:
                        yield from _texts(item.data)
        except httpx.TransportError as failure:
            if self._id is None:
                with self._transport.translated():
                    raise
            self._require_time(str(failure) or type(failure).__name__)
            return
        self._require_time("the stream ended early")

    def _require_time(self, cause: str) -> None:
        """Raise Unavailable if the stream cannot be resumed, or not any more."""
        now_s = time.monotonic()
        if self._broken_since_s is None:
            self._broken_since_s = now_s
        broken_s = now_s - self._broken_since_s
        if self._id is None or broken_s >= self._resume_s:
            url = self._transport.target.url
            raise Unavailable(
                f"the answer broke off, and {url} did not continue it for {broken_s:.0f} s: {cause}",
                hint="check that the server runs (`share-compute up`), then ask again",
            )

    def cancel(self) -> None:
        """Cancel the request if it is still running; do nothing if the server does not answer."""
        if self._id is not None and not self._is_done:
            with suppress(httpx.TransportError):
                url = f"{self._transport.target.url}/v1/streams/{self._id}"
                self._transport.http.delete(url, timeout=_CANCEL_TIMEOUT_S)


def _texts(data: str) -> Iterator[str]:
    chunk = json.loads(data)
    if "error" in chunk:
        raise Unavailable(chunk["error"]["message"])
    for choice in chunk["choices"]:
        if text := choice.get("text") or choice.get("delta", {}).get("content"):
            yield text


def _raise_for_error(response: httpx.Response) -> None:
    if response.is_success:
        return
    response.read()
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        raise Unavailable(
            f"{response.url} answered {response.status_code} {response.reason_phrase}",
            hint="check that the URL is that of a share-compute server",
        ) from None
    unknown = ShareComputeError if response.is_server_error else UserError
    raise _KINDS.get(response.status_code, unknown)(message)
