"""Writes the machines' heartbeats to the database."""

from __future__ import annotations

import asyncio
import logging

from share_compute.errors import ShareComputeError
from share_compute.store.heartbeats import Heartbeats

_WRITE_S = 1.0
"""Pause between two transactions, in seconds; a crash of the server loses the heartbeats of this time."""
_log = logging.getLogger(__name__)


async def write_heartbeats(heartbeats: Heartbeats) -> None:
    """Write new heartbeats once per second until cancelled; `Store.close` writes the last ones."""
    while True:
        await asyncio.sleep(_WRITE_S)
        try:
            await asyncio.to_thread(heartbeats.write)
        except ShareComputeError as failure:
            _log.warning("heartbeats could not be written: %s", failure.message)
