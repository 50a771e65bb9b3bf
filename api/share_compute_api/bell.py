"""Wakes whoever waits for something new in the store."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Bell:
    """Rings when something was committed. Take a ``ticket``, look, wait: nothing is missed in between."""

    def __init__(self) -> None:
        self.ticket = 0
        """How often it rang."""
        self.is_closed = False
        """Whether streams must end, because the server does."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next = asyncio.Event()

    def ring(self) -> None:
        """Wake all that wait; may be called from any thread."""
        if self._loop is None:
            self.ticket += 1  # nobody waits yet; whoever took a ticket before this will not wait
            return
        # A loop that closed meanwhile has nobody to wake.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake)

    def close(self) -> None:
        """Wake all that wait, for the last time; may be called from any thread."""
        self.is_closed = True
        self.ring()

    async def wait(self, ticket: int, timeout_s: float) -> bool:
        """Wait until it rings after ``ticket`` was taken; False when ``timeout_s`` passed first."""
        self._loop = asyncio.get_running_loop()
        if self.ticket != ticket or self.is_closed:
            await asyncio.sleep(0)  # a loop that waits here only must not keep all others from running
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
