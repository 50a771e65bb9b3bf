"""Limits the concurrency of requests with expensive work: a few run, others wait, and the rest get `Busy`."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from anyio import from_thread
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
        at_once_of_one: maximum number of functions of one caller that run at the same time, so that slow functions of
            one caller do not stop those of other callers.
        most_away: maximum number of functions that wait for another server at the same time; see `away`.
        most_away_of_one: maximum number of such functions per caller.
    """

    def __init__(
        self,
        at_once: int = 4,
        most_waiting: int = 60,
        most_of_one: int = 16,
        at_once_of_one: int = 2,
        *,
        most_away: int = 8,
        most_away_of_one: int = 2,
    ) -> None:
        self._turns = asyncio.Semaphore(at_once)
        self._turns_of_one: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(at_once_of_one)
        )
        self._most = at_once + most_waiting
        self._most_of_one = most_of_one
        self._under_way: Counter[str] = Counter()
        self._most_away = most_away
        self._most_away_of_one = most_away_of_one
        self._away: Counter[str] = Counter()
        self._lock = threading.Lock()

    async def run(self, caller: str, work: Callable[[], Result]) -> Result:
        """Run a function in a thread and return its result.

        Args:
            caller: id of the API key of the request.
            work: the function.

        Raises:
            Busy: too many functions run or wait, in total or for this caller.
        """
        found = _at_limit(self._under_way, caller, self._most_of_one, self._most)
        if found:
            raise _busy(f"{found[0]} jobs and plans{found[1]} are being checked or wait for a check")
        self._under_way[caller] += 1
        try:
            await self._acquire_turns(caller)
            try:
                return await run_in_threadpool(work)
            finally:
                self._release_turns(caller)
        finally:
            self._under_way[caller] -= 1
            if not self._under_way[caller]:
                del self._under_way[caller]
                self._turns_of_one.pop(caller, None)

    async def _acquire_turns(self, caller: str) -> None:
        turns_of_one = self._turns_of_one[caller]
        await turns_of_one.acquire()
        try:
            await self._turns.acquire()
        except BaseException:
            turns_of_one.release()
            raise

    def _release_turns(self, caller: str) -> None:
        self._turns.release()
        self._turns_of_one[caller].release()

    @contextmanager
    def away(self, caller: str) -> Iterator[None]:
        """Let other functions of any caller run while a function of `run` waits for another server inside the block.

        Args:
            caller: id of the API key of the request.

        Raises:
            Busy: too many functions wait for another server, in total or for this caller.
        """
        with self._lock:
            found = _at_limit(self._away, caller, self._most_away_of_one, self._most_away)
            if found:
                raise _busy(f"{found[0]} requests{found[1]} wait for the Hub")
            self._away[caller] += 1
        try:
            from_thread.run_sync(self._release_turns, caller)
            try:
                yield
            finally:
                from_thread.run(self._acquire_turns, caller)
        finally:
            with self._lock:
                self._away[caller] -= 1
                if not self._away[caller]:
                    del self._away[caller]


def _at_limit(counts: Counter[str], caller: str, most_of_one: int, most: int) -> tuple[int, str] | None:
    """Return the count that has reached its limit, and its scope; None if one more function is allowed."""
    mine, all_ = counts[caller], counts.total()
    if mine >= most_of_one:
        return mine, " of this key"
    return (all_, "") if all_ >= most else None


def _busy(message: str) -> Busy:
    return Busy(message, hint=f"try again in {_RETRY_AFTER_S} s", details={"retry_after_s": _RETRY_AFTER_S})
