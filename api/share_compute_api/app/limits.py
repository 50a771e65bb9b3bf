"""Limits the size of request bodies."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware that refuses bodies that are too large with status 413, with or without a Content-Length.

    Args:
        app: the wrapped application.
        most_bytes: maximum size of a body, in bytes.
        larger: maximum size in bytes by path prefix, instead of ``most_bytes``; the first matching prefix counts.
    """

    def __init__(
        self, app: ASGIApp, most_bytes: int, larger: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        self._app = app
        self._most_bytes = most_bytes
        self._larger = larger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the wrapped application with a ``receive`` that raises status 413 when the body is too large."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        larger = (most for prefix, most in self._larger.items() if scope["path"].startswith(prefix))
        most_bytes = next(larger, self._most_bytes)
        received_bytes = 0
        announced = dict(scope["headers"]).get(b"content-length", b"0")

        async def counting() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > most_bytes or (announced.isdigit() and int(announced) > most_bytes):
                raise HTTPException(413, f"the body is larger than {most_bytes} bytes")
            return message

        await self._app(scope, counting, send)
