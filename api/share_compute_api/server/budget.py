"""Limits the concurrency of requests with expensive work: a few run, others wait, and the rest get `Busy`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from fastapi.concurrency import run_in_threadpool

from share_compute.errors import Busy

_RETRY_AFTER_S = 5
Result = TypeVar("Result")


class Budget:
    """Runs functions in threads, a limited number at a time, in order of arrival.

    Args:
        at_once: maximum number of functions that run at the same time.
        most_waiting: maximum number of functions that wait; further functions are rejected.
        most_of_one: maximum number of running and waiting functions per caller, so that other callers get a share.
    """

    def __init__(self, at_once: int = 4, most_waiting: int = 60, most_of_one: int = 16) -> None:
        self._turns = asyncio.Semaphore(at_once)
        self._most = at_once + most_waiting
        self._most_of_one = most_of_one
        self._under_way: Counter[str] = Counter()

    async def run(self, caller: str, work: Callable[[], Result]) -> Result:
        """Run a function in a thread and return its result.

        Args:
            caller: id of the API key of the request.
            work: the function.

        Raises:
            Busy: too many functions run or wait, in total or for this caller.
        """
        mine, all_ = self._under_way[caller], self._under_way.total()
        if mine >= self._most_of_one or all_ >= self._most:
            count, whose = (mine, " of this key") if mine >= self._most_of_one else (all_, "")
            raise Busy(
                f"{count} jobs and plans{whose} are being checked or wait for a check",
                hint=f"try again in {_RETRY_AFTER_S} s",
                details={"retry_after_s": _RETRY_AFTER_S},
            )
        self._under_way[caller] += 1
        try:
            async with self._turns:
                return await run_in_threadpool(work)
        finally:
            self._under_way[caller] -= 1
            if not self._under_way[caller]:
                del self._under_way[caller]
