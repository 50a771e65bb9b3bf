"""Encodes server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from fastapi.sse import format_sse_event

MEDIA_TYPE: Final = "text/event-stream"
HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""HTTP headers of every stream, so that neither caches nor proxies hold events back."""
KEEPALIVE: Final = b": still here\n\n"
"""A comment line, which clients ignore. It is sent because proxies close idle connections."""
KEEPALIVE_S = 10.0
"""Time without an event after which `KEEPALIVE` is sent, in seconds."""
_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_LINE_ENDS = {ord(mark): f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"}
"""Code point -> JSON escape sequence, for characters at which some clients wrongly split lines. In JSON the characters
occur only inside strings."""


def event(data: str, *, kind: str | None = None, id_: str | int | None = None) -> bytes:
    """Return one encoded event.

    Args:
        data: content of the event: JSON, or ASCII text.
        kind: name of the event; None for a message without a name.
        id_: id of the event; a client that reconnects sends the id of the last event that it received.
    """
    if not data.isascii():
        data = data.translate(_LINE_ENDS)
    return format_sse_event(data_str=data, event=kind, id=None if id_ is None else str(id_))


def json_event(data: Mapping[str, Any], *, kind: str | None = None, id_: str | None = None) -> bytes:
    """Return one encoded event with a JSON object as its content; see `event`."""
    return event(_ENCODE(data), kind=kind, id_=id_)


def reconnection(after_ms: int) -> bytes:
    """Return the field that asks clients to reconnect ``after_ms`` milliseconds after a lost connection."""
    return format_sse_event(retry=after_ms)
