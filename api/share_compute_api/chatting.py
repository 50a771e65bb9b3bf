"""Talks to served models by the OpenAI API; where its errors become ours again."""

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
from share_compute_api.transport import Transport

_SILENCE_S = 60.0
"""A stream gives a sign of life every 10 s; after this much silence the connection is taken for lost."""
_DONE = "[DONE]"
_KINDS: dict[int, type[ShareComputeError]] = {
    HTTPStatus.UNAUTHORIZED: NotAuthorized,
    HTTPStatus.NOT_FOUND: NotFound,
    HTTPStatus.TOO_MANY_REQUESTS: Busy,
    HTTPStatus.SERVICE_UNAVAILABLE: Unavailable,
}


def require_model(transport: Transport, name: str) -> dict[str, Any]:
    """Return what ``/v1/models`` says of a model, or raise the error that tells why it does not answer."""
    with transport.translated():
        answer = transport.http.get(f"{transport.target.url}/v1/models/{quote(name, safe='')}")
    _raise_for_error(answer)
    facts: dict[str, Any] = answer.json()
    return facts


def stream(
    transport: Transport, route: Literal["chat/completions", "completions"], request: dict[str, Any]
) -> Iterator[str]:
    """Yield the text of an answer as it comes.

    Args:
        transport: to the server.
        route: below ``/v1``.
        request: the body, without ``stream``.

    Raises:
        ShareComputeError: what the server answered with, before the text or amid it.
    """
    url = f"{transport.target.url}/v1/{route}"
    timeout = httpx.Timeout(30.0, read=_SILENCE_S)
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
            mend="check that the URL is that of a share-compute server",
        ) from None
    unknown = ShareComputeError if response.is_server_error else UserError
    raise _KINDS.get(response.status_code, unknown)(message)
