"""A bound on the size of request bodies, before anything reads them."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware that answers 413 to bodies above ``most_bytes``, announced or not."""

    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self._app = app
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what arrives."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received_bytes = 0
        announced = dict(scope["headers"]).get(b"content-length", b"0")

        async def counting() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > self._most_bytes or (
                announced.isdigit() and int(announced) > self._most_bytes
            ):
                raise HTTPException(413, f"the body is larger than {self._most_bytes} bytes")
            return message

        await self._app(scope, counting, send)
