"""Cancels requests when their client disconnects or the server shuts down."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Literal, TypeVar

from starlette.types import Receive

from share_compute.errors import Unavailable
from share_compute_api.connection.notifier import Notifier

_LONG_S = 3600.0
Result = TypeVar("Result")
Departure = Literal["gone", "ending"]


async def departure(receive: Receive, notifier: Notifier) -> Departure:
    """Wait until the client disconnects (return "gone") or the server shuts down (return "ending").

    The caller must have read the request's body before.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def closed() -> None:
        while not notifier.is_closed:
            await notifier.wait(notifier.ticket, _LONG_S)

    watches = [asyncio.ensure_future(watch()) for watch in (disconnected, closed)]
    try:
        await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for watch in watches:
            watch.cancel()
    return "gone" if watches[0].done() else "ending"


class ClientGone(Exception):
    """Raised when the client disconnected before it got the response."""


async def while_wanted(work: Awaitable[Result], receive: Receive, notifier: Notifier) -> Result:
    """Return the result of ``work``; cancel it if the client disconnects or the server shuts down.

    Raises:
        ClientGone: the client disconnected.
        Unavailable: the server shuts down.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(departure(receive, notifier))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        if await watch == "gone":
            raise ClientGone
        raise Unavailable("the server ends", hint="ask again in a while")
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
