"""The reconciliation loop of all supervisors: one pass over the store at a time, repeated when the store changes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from share_compute.errors import ShareComputeError
from share_compute_api.connection.notifier import Notifier

LOOK_S = 1.0
"""Longest pause between two passes over the store, in seconds."""
_log = logging.getLogger(__name__)


async def keep_looking(look: Callable[[], Awaitable[None]], at: str, notifier: Notifier) -> NoReturn:
    """Call ``look`` until cancelled; log each failure and continue.

    Args:
        look: makes one pass: reads the store and acts on it.
        at: plural noun for the log, such as "batches".
        notifier: notifies of changes in the store.
    """
    while True:
        ticket = notifier.ticket
        try:
            await look()
        except ShareComputeError as failure:
            _log.warning("%s could not be checked: %s", at, failure.message)
        await notifier.wait(ticket, LOOK_S)
