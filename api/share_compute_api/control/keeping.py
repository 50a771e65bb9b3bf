"""Restarts the server's background loops after failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

_PAUSE_S = 1.0
_log = logging.getLogger(__name__)


async def keep_running(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Call ``work`` in a loop until cancelled; log the traceback when a call fails.

    Without the loop, a short failure of the database would end supervision, while the server still answers requests.
    """
    while True:
        try:
            await work()
        except Exception:  # noqa: BLE001 - the exception is logged, and the loop continues
            _log.exception("supervision of %s failed; restarting in %.0f s", name, _PAUSE_S)
        await asyncio.sleep(_PAUSE_S)
