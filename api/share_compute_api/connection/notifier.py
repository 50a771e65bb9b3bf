"""Wakes tasks that wait for new events in the store."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Notifier:
    """Wakes waiting tasks after a commit to the store.

    Read ``ticket``, read the store, then call `wait` with the ticket. A commit between these calls is not missed.
    """

    def __init__(self) -> None:
        self.ticket = 0
        """Number of notifications so far."""
        self.is_closed = False
        """Whether event streams must end, because the server shuts down."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wake all waiting tasks; may be called from any thread."""
        if self._loop is None:
            self.ticket += 1  # no task waits yet; a later `wait` with an older ticket returns at once
            return
        # If the loop was closed meanwhile, there is no task to wake.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake)

    def close(self) -> None:
        """Set `is_closed` and wake all waiting tasks; may be called from any thread."""
        self.is_closed = True
        self.notify()

    async def wait(self, ticket: int, timeout_s: float) -> bool:
        """Wait for a notification later than ``ticket`` or for `close`; return False if ``timeout_s`` passes first."""
        self._loop = asyncio.get_running_loop()
        if self.ticket != ticket or self.is_closed:
            # Yield to the event loop: a caller that awaits nothing else must not block other tasks.
            await asyncio.sleep(0)
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
