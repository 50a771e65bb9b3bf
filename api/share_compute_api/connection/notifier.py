"""Notification of tasks that wait for new events in the store."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Notifier:
    """Wakes waiting tasks after a commit.

    Read ``ticket``, read the store, then call `wait` with the ticket: a commit between these calls is not missed.
    """

    def __init__(self) -> None:
        self.ticket = 0
        """Number of notifications so far."""
        self.is_closed = False
        """Whether streams must end, because the server ends."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wake all waiting tasks; may be called from any thread."""
        if self._loop is None:
            self.ticket += 1  # no task waits yet; a task that read the ticket before this will not wait
            return
        # A loop that was closed meanwhile has no task to wake.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake)

    def close(self) -> None:
        """Wake all waiting tasks for the last time; may be called from any thread."""
        self.is_closed = True
        self.notify()

    async def wait(self, ticket: int, timeout_s: float) -> bool:
        """Wait for a notification later than ``ticket``; returns False if ``timeout_s`` passes first."""
        self._loop = asyncio.get_running_loop()
        if self.ticket != ticket or self.is_closed:
            await asyncio.sleep(0)  # yield: a caller whose only await is this one must not starve other tasks
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._next.wait()
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        self.ticket += 1
        self._next.set()
        self._next = asyncio.Event()
