"""Client of the OpenAI API of served models; converts the API's errors to `ShareComputeError`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, Literal
from urllib.parse import quote

import httpx
from httpx_sse import EventSource, connect_sse

from share_compute.errors import (
    Busy,
    NotAuthorized,
    NotFound,
    ShareComputeError,
    Unavailable,
    UserError,
)
from share_compute_api.connection.transport import Transport

_READ_TIMEOUT_S = 60.0
"""Read timeout of a stream, in seconds; the server sends a keep-alive after 10 s without an event."""
_DONE = "[DONE]"
_KINDS: dict[int, type[ShareComputeError]] = {
    HTTPStatus.UNAUTHORIZED: NotAuthorized,
    HTTPStatus.NOT_FOUND: NotFound,
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
    transport: Transport, route: Literal["chat/completions", "completions"], request: dict[str, Any]
) -> Iterator[str]:
    """Yield the text of an answer in pieces, as it arrives.

    Args:
        transport: connection to the server.
        route: route below ``/v1``.
        request: body of the request, without ``stream``.

    Raises:
        ShareComputeError: the server reported an error, or could not be reached.
    """
    url = f"{transport.target.url}/v1/{route}"
    timeout = httpx.Timeout(30.0, read=_READ_TIMEOUT_S)
    source: EventSource
    with (
        transport.translated(),
        connect_sse(transport.http, "POST", url, json={**request, "stream": True}, timeout=timeout) as source,
    ):
        _raise_for_error(source.response)
        for item in source.iter_sse():
            if item.data == _DONE:
                return
            if not item.data:
                continue
            chunk = json.loads(item.data)
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
