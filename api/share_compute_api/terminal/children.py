"""Starts share-compute commands as child processes, and handles Ctrl-C and SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

from share_compute_actors.machine.processes import ChildProcesses

_MAIN = "from share_compute_api.cli import main; main()"
_FORCED = 130
_SAME_SIGNAL_S = 0.5


def own_command(*arguments: str) -> list[str]:
    """Return the command line that runs ``share-compute`` with these arguments in this installation."""
    return [sys.executable, "-c", _MAIN, *arguments]


class Interrupts:
    """Context manager that handles Ctrl-C and SIGTERM.

    The first signal raises KeyboardInterrupt in the main thread, so that the clean-up runs. A second signal kills the
    child processes and ends this process, without waiting for the clean-up. Signals within half a second of each other
    count as one, because programs such as ``timeout`` signal a process and then its whole group.
    """

    def __init__(self) -> None:
        self._rosters: list[ChildProcesses] = []
        self._is_stopping = False
        self._last = float("-inf")
        self._previous: dict[
            int, signal.Handlers | Callable[[int, FrameType | None], object] | int | None
        ] = {}

    def takes_along(self, children: ChildProcesses) -> None:
        """Register child processes, so that a second signal kills them."""
        self._rosters.append(children)

    def install(self) -> None:
        """Install the signal handlers. Call this again after a library has replaced them."""
        for number in (signal.SIGINT, signal.SIGTERM):
            found = signal.signal(number, self._handle)
            self._previous.setdefault(number, found)

    def begin_stopping(self) -> None:
        """Mark the start of the clean-up: the next signal ends the process at once."""
        self._is_stopping = True
        self.install()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        before, self._last = self._last, time.monotonic()
        if not self._is_stopping:
            self._is_stopping = True
            raise KeyboardInterrupt
        if self._last - before < _SAME_SIGNAL_S:
            return
        try:
            for children in self._rosters:
                children.kill_all()
        finally:
            os._exit(_FORCED)

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
