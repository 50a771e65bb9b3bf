"""The reconciliation loop of jobs, batches and deployments: acts on each change in the store, and periodically."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from share_compute.errors import ShareComputeError
from share_compute_api.connection.notifier import Notifier

POLL_S = 1.0
"""Longest pause between two passes over the store, in seconds."""
_log = logging.getLogger(__name__)


async def poll_forever(poll: Callable[[], Awaitable[None]], at: str, notifier: Notifier) -> NoReturn:
    """Call ``poll`` until cancelled; log each `ShareComputeError` and continue.

    Args:
        poll: makes one pass: reads the store and acts on it.
        at: plural noun for the log, such as "batches".
        notifier: signals changes in the store.
    """
    while True:
        ticket = notifier.ticket
        try:
            await poll()
        except ShareComputeError as failure:
            _log.warning("%s could not be checked: %s", at, failure.message)
        await notifier.wait(ticket, POLL_S)
