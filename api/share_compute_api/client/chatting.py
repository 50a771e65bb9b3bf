"""Client of the OpenAI API of served models; converts the API's errors to `ShareComputeError`."""

from __future__ import annotations

import asyncio
import json
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Generic, Literal, TypeAlias, TypeVar
from urllib.parse import quote

import httpx
from httpx_sse import ServerSentEvent, aconnect_sse, connect_sse

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
from share_compute_api.connection.transport import AsyncTransport, Transport

_READ_TIMEOUT_S = 60.0
"""Read timeout of a stream, in seconds; the server sends a keep-alive after 10 s without an event."""
_CANCEL_TIMEOUT_S = 5.0
RESUME_S = 120.0
"""Default of ``resume_s``, in seconds."""
_PAUSES_S = (0.1, 0.5)
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
ModelRoute: TypeAlias = Literal["chat/completions", "completions"]
Texts = TypeVar("Texts")
"""Iterator of the pieces of an answer: an ``Iterator[str]`` or an ``AsyncIterator[str]``."""
_KINDS: dict[int, type[ShareComputeError]] = {
    HTTPStatus.UNAUTHORIZED: NotAuthorized,
    HTTPStatus.NOT_FOUND: NotFound,
    HTTPStatus.GONE: Gone,
    HTTPStatus.TOO_MANY_REQUESTS: Busy,
    HTTPStatus.SERVICE_UNAVAILABLE: Unavailable,
}


def model_url(url: str, name: str) -> str:
    """Return the URL of a model's entry in ``/v1/models``."""
    return f"{url}/v1/models/{quote(name, safe='')}"


def model_facts(response: httpx.Response) -> dict[str, Any]:
    """Return a model's entry in ``/v1/models``; raise the server's error if the model is not available."""
    _raise_for_error(response)
    facts: dict[str, Any] = response.json()
    return facts


def stream(transport: Transport, answer: StreamedAnswer) -> Iterator[str]:
    """Yield the text of an answer in pieces, as it arrives.

    If the connection breaks or the server restarts, the client resumes the stream after its last event. Closing the
    iterator cancels the request.

    Raises:
        ShareComputeError: the server reported an error, or could not be reached.
    """
    try:
        while not answer.is_done:
            time.sleep(answer.pause_s())
            try:
                method, url, options = answer.connection()
                with connect_sse(transport.http, method, url, **options) as source:
                    if not source.response.is_success:
                        source.response.read()
                    for item in source.iter_sse() if answer.opens(source.response) else ():
                        yield from answer.texts(item)
                        if answer.is_done:
                            break
            except httpx.TransportError as failure:
                with transport.translated():
                    answer.broke(failure)
    except ShareComputeError:
        raise
    except BaseException:  # the caller closed the iterator, or Ctrl-C was pressed
        if (running := answer.url_to_cancel) is not None:
            with suppress(httpx.TransportError):
                transport.http.delete(running, timeout=_CANCEL_TIMEOUT_S)
        raise


async def stream_async(transport: AsyncTransport, answer: StreamedAnswer) -> AsyncIterator[str]:
    """Yield the text of an answer in pieces, as it arrives; see `stream`."""
    try:
        while not answer.is_done:
            await asyncio.sleep(answer.pause_s())
            try:
                method, url, options = answer.connection()
                async with aconnect_sse(transport.http, method, url, **options) as source:
                    if not source.response.is_success:
                        await source.response.aread()
                    if answer.opens(source.response):
                        async for item in source.aiter_sse():
                            for text in answer.texts(item):
                                yield text
                            if answer.is_done:
                                break
            except httpx.TransportError as failure:
                with transport.translated():
                    answer.broke(failure)
    except ShareComputeError:
        raise
    except BaseException:  # the caller closed the iterator, or the task was cancelled
        if (running := answer.url_to_cancel) is not None:
            with suppress(httpx.TransportError):
                await transport.http.delete(running, timeout=_CANCEL_TIMEOUT_S)
        raise


class ModelUser(Generic[Texts]):
    """Methods of both clients that send requests to served models."""

    url: str
    """URL of the server."""

    @abstractmethod
    def _stream(self, answer: StreamedAnswer) -> Texts:
        """Return an iterator over the pieces of an answer."""

    def chat(
        self, model: str, messages: Sequence[dict[str, str]], *, resume_s: float = RESUME_S, **options: Any
    ) -> Texts:
        """Return an iterator over a model's answer to a conversation, piece by piece; closing it ends the request.

        If the connection breaks or the server restarts, the answer continues where it stopped.

        Args:
            model: name of a deployment.
            messages: mappings with ``role`` and ``content``.
            resume_s: seconds for which the client tries to resume a broken answer; 0 never resumes.
            options: further fields of the request to /v1/chat/completions: ``temperature``, ``max_tokens``, ...
        """
        return self._ask("chat/completions", resume_s, model=model, messages=list(messages), **options)

    def complete(self, model: str, prompt: str, *, resume_s: float = RESUME_S, **options: Any) -> Texts:
        """Return an iterator over a model's continuation of a text, piece by piece; closing it ends the request.

        The other arguments are those of `chat`; ``options`` are fields of the request to /v1/completions.
        """
        return self._ask("completions", resume_s, model=model, prompt=prompt, **options)

    def _ask(self, route: ModelRoute, resume_s: float, /, **request: Any) -> Texts:
        return self._stream(StreamedAnswer(self.url, route, request, resume_s=resume_s))


class StreamedAnswer:
    """One streamed answer, over all its connections; it sends nothing itself.

    Args:
        url: URL of the server.
        route: route below ``/v1``.
        request: body of the request, without ``stream``.
        resume_s: seconds for which the client tries to resume a broken stream; 0 never resumes.
    """

    def __init__(
        self,
        url: str,
        route: ModelRoute,
        request: dict[str, Any],
        *,
        resume_s: float,
    ) -> None:
        self._url = f"{url}/v1"
        self._server = url
        self._route = route
        self._request = request
        self._resume_s = resume_s
        self._id: str | None = None
        """Id of the stream; None if the stream cannot be resumed."""
        self._has_begun = False
        self._last_event_id = ""
        self.is_done = False
        self._broken_since_s: float | None = None
        """Time at which the stream broke, on the monotonic clock; None while events arrive."""
        self._backoff = ExponentialBackoff(*_PAUSES_S, has_jitter=True)

    def pause_s(self) -> float:
        """Return the delay before the next connection, in seconds: 0 before the first one.

        Raises:
            Unavailable: the stream ended early, and cannot be resumed or not in time.
        """
        if not self._has_begun:
            return 0.0
        self._require_time("the stream ended early")
        return self._backoff.failed()

    def connection(self) -> tuple[str, str, dict[str, Any]]:
        """Return the method, the URL and the options of the next connection."""
        timeout = httpx.Timeout(30.0, read=_READ_TIMEOUT_S)
        if not self._has_begun:
            self._has_begun = True
            body, headers = {**self._request, "stream": True}, {RESUMABLE: "true"}
            return (
                "POST",
                f"{self._url}/{self._route}",
                {"json": body, "headers": headers, "timeout": timeout},
            )
        headers = {"Last-Event-ID": self._last_event_id} if self._last_event_id else {}
        return "GET", f"{self._url}/streams/{self._id}", {"headers": headers, "timeout": timeout}

    def opens(self, response: httpx.Response) -> bool:
        """Return whether a connection has events; False if the stream may be resumed later.

        Raises:
            ShareComputeError: the error that the server reports.
        """
        if self._id is not None and response.status_code in _PASSING:
            self._require_time(f"it answers {response.status_code}")
            return False
        _raise_for_error(response)
        self._id = response.headers.get(STREAM_ID)
        return True

    def texts(self, item: ServerSentEvent) -> list[str]:
        """Return the pieces of text in an event."""
        self._broken_since_s = None
        self._backoff.reset()
        self._last_event_id = item.id
        if item.data == _DONE:
            self.is_done = True
        return [*_texts(item.data)] if item.data and not self.is_done else []

    def broke(self, failure: httpx.TransportError) -> None:
        """Record a broken connection; raise the failure if the stream cannot be resumed, or not in time."""
        if self._id is None:
            raise failure
        self._require_time(str(failure) or type(failure).__name__)

    def _require_time(self, cause: str) -> None:
        now_s = time.monotonic()
        if self._broken_since_s is None:
            self._broken_since_s = now_s
        broken_s = now_s - self._broken_since_s
        if self._id is None or broken_s >= self._resume_s:
            raise Unavailable(
                f"the answer broke off, and {self._server} did not continue it for {broken_s:.0f} s: {cause}",
                hint="check that the server runs (`share-compute up`), then ask again",
            )

    @property
    def url_to_cancel(self) -> str | None:
        """URL that cancels the request; None if the request is over or cannot be cancelled."""
        return None if self._id is None or self.is_done else f"{self._url}/streams/{self._id}"


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
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        raise Unavailable(
            f"{response.url} answered {response.status_code} {response.reason_phrase}",
            hint="check that the URL is that of a share-compute server",
        ) from None
    unknown = ShareComputeError if response.is_server_error else UserError
    # The message ends with the hint for programs, which mentions a route.
    text, _, hint = message.partition("GET /v1/models")
    raise _KINDS.get(response.status_code, unknown)(
        text.rstrip("; "), hint="share-compute deployments lists what is served" if hint else None
    )
