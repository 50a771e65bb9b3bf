"""The encoder of server-sent events, for answers that are streamed and for the events of jobs and of the cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from fastapi.sse import format_sse_event

MEDIA_TYPE: Final = "text/event-stream"
HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Headers of every stream: neither caches nor proxies may hold events back."""
KEEPALIVE: Final = b": still here\n\n"
"""A comment, which clients ignore: proxies close connections that are idle for long."""
_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_LINE_ENDS = {ord(mark): f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"}
"""Characters that end no line in an event, but do for clients that split lines as their language does. They occur in
JSON only inside strings, where their escape means the same."""


def event(data: str, *, kind: str | None = None, number: int | None = None) -> bytes:
    """Return one event.

    Args:
        data: its content: JSON, or text in ASCII.
        kind: name of the event; None for a message without a name.
        number: id with which a client that reconnects names the last event it has seen.
    """
    if not data.isascii():
        data = data.translate(_LINE_ENDS)
    return format_sse_event(data_str=data, event=kind, id=None if number is None else str(number))


def json_event(data: Mapping[str, Any]) -> bytes:
    """Return one event without a name, with a JSON object as its content."""
    return event(_ENCODE(data))


def reconnection(after_ms: int) -> bytes:
    """Return the request to reconnect after ``after_ms`` milliseconds when the connection is lost."""
    return format_sse_event(retry=after_ms)
