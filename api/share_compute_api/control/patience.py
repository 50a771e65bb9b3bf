"""Time limits of supervision, and retries of store operations within a time limit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from share_compute.errors import Unavailable

_PAUSE_S = 1.0
_log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Patience:
    """Time limits for supervising jobs and batches, in seconds."""

    answer_s: float = 60.0
    """Time to wait for an answer of a coordinator, which may still be starting on a busy machine."""
    store_s: float = 60.0
    """Time for which store operations are retried while the store does not answer; then the attempt is ended."""
    cancel_s: float = 30.0
    """Time for an attempt to stop after a cancellation request, before the attempt is killed."""
    return_s: float = 60.0
    """Time after the server's start during which machines of an earlier server process are expected to reconnect."""
    arrival_s: float = 120.0
    """Time that a job waits for machines that are joining or being measured, before it starts without them."""
    retry_s: float = 4.0
    """Pause after a lost attempt, so that Ray can detect dead machines. The pause doubles with each further consecutive
    attempt that commits no step."""
    offer_s: float = 300.0
    """Time for a running job to accept an offered machine, before the machine is offered to another job."""


async def patiently(patience: Patience, work: Callable[[], Result]) -> Result:
    """Run ``work``, an operation on the store, in a thread; retry while the store does not answer.

    Raises:
        Unavailable: the store did not answer within ``patience.store_s``.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + patience.store_s
    while True:
        try:
            return await asyncio.to_thread(work)
        except Unavailable as failure:
            if clock() + _PAUSE_S > deadline:
                raise
            _log.warning("%s; trying again in %.0f s", failure.message, _PAUSE_S)
        await asyncio.sleep(_PAUSE_S)
