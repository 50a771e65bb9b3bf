"""Restarts the server's background loops after failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

_PAUSE_S = 1.0
_log = logging.getLogger(__name__)


async def keep_running(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Call ``work`` again whenever it ends, until cancelled; if it failed, log the traceback.

    Without the restart, a short failure of the database would leave a server that answers requests but never runs a job
    again.
    """
    while True:
        try:
            await work()
        except Exception:  # noqa: BLE001 - whatever it is, the log has it and the loop continues
            _log.exception("supervision of %s failed; it starts again in %.0f s", name, _PAUSE_S)
        await asyncio.sleep(_PAUSE_S)
