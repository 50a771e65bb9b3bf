"""A bound on requests that read files or parse much: few at a time, some that wait, and the others come again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi.concurrency import run_in_threadpool

from share_compute.errors import Busy

_RETRY_AFTER_S = 5
Result = TypeVar("Result")


class Budget:
    """Runs functions in threads, in the order in which they came.

    Args:
        at_once: functions that run at one time.
        most_waiting: functions that wait; further ones are refused.
    """

    def __init__(self, at_once: int = 4, most_waiting: int = 60) -> None:
        self._turns = asyncio.Semaphore(at_once)
        self._most = at_once + most_waiting
        self._under_way = 0

    async def run(self, work: Callable[[], Result]) -> Result:
        """Return what a function returns.

        Raises:
            Busy: too many wait.
        """
        if self._under_way >= self._most:
            raise Busy(
                f"{self._under_way} jobs and plans are being checked, or wait for that",
                mend=f"try again in {_RETRY_AFTER_S} s",
                details={"retry_after_s": _RETRY_AFTER_S},
            )
        self._under_way += 1
        try:
            async with self._turns:
                return await run_in_threadpool(work)
        finally:
            self._under_way -= 1
