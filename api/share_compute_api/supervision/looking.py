"""The loop of all supervisors: look at the store, and again when it changed."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from share_compute.errors import ShareComputeError
from share_compute_api.bell import Bell

_log = logging.getLogger(__name__)


async def keep_looking(
    look: Callable[[], Awaitable[None]], at: str, bell: Bell, longest_pause_s: float
) -> NoReturn:
    """Look until cancelled; what could not be looked at is looked at again.

    Args:
        look: does what there is to do.
        at: what it looks at, in the plural.
        bell: rings when the store changed.
        longest_pause_s: between two looks, if it does not ring.
    """
    while True:
        ticket = bell.ticket
        try:
            await look()
        except ShareComputeError as failure:
            _log.warning("%s could not be looked at: %s", at, failure.message)
        await bell.wait(ticket, longest_pause_s)
