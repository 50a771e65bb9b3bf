"""Time limits in the supervision of jobs."""

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
    """Time limits in the supervision of jobs, in seconds."""

    answer_s: float = 60.0
    """Time for a coordinator to answer; it may just be starting on a busy machine."""
    store_s: float = 60.0
    """Time for the store to answer, before an attempt is given up whose events cannot be written."""
    cancel_s: float = 30.0
    """Time for an attempt to stop after it was asked to."""
    return_s: float = 60.0
    """Time for machines that an earlier server knew to come back, before a job begins without them."""
    arrival_s: float = 120.0
    """Time for machines that are joining or being measured, before a job begins without them."""
    retry_s: float = 4.0
    """Pause after an attempt was lost, in which Ray notices dead machines. It doubles with each further attempt that is
    lost before it committed a step."""
    offer_s: float = 300.0
    """Time for a running job to take a machine that it is offered, before another job is offered it."""


async def patiently(patience: Patience, work: Callable[[], Result]) -> Result:
    """Run ``work``, an operation on the store, in a thread; repeat it while the store does not answer.

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
