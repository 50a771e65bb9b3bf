"""The loop of all supervisors: look at the store, and again when it changes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from share_compute.errors import ShareComputeError
from share_compute_api.connection.notifier import Notifier

LOOK_S = 1.0
"""Longest pause between two looks, in seconds."""
_log = logging.getLogger(__name__)


async def keep_looking(look: Callable[[], Awaitable[None]], at: str, notifier: Notifier) -> NoReturn:
    """Call ``look`` until cancelled; after a failure, log it and look again.

    Args:
        look: looks once, and acts.
        at: the things that it looks at, in the plural, for the log.
        notifier: notifies of changes in the store.
    """
    while True:
        ticket = notifier.ticket
        try:
            await look()
        except ShareComputeError as failure:
            _log.warning("%s could not be looked at: %s", at, failure.message)
        await notifier.wait(ticket, LOOK_S)
