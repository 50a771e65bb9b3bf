"""How commands of share-compute start other commands, and how long-running ones are ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

from share_compute_actors.machine.processes import Roster

_MAIN = "from share_compute_api.cli import main; main()"
_FORCED = 130
_SAME_SIGNAL_S = 0.5


def own_command(*arguments: str) -> list[str]:
    """Return the command that runs ``share-compute`` with these arguments in this installation."""
    return [sys.executable, "-c", _MAIN, *arguments]


class Interrupts:
    """Ctrl-C and SIGTERM inside the block: the first ends the block, one more ends everything at once.

    The first raises KeyboardInterrupt wherever the main thread is, so the block's own cleaning up runs. One
    more does not interrupt that half-way, but kills our children and ends the process. What comes within half a
    second of another counts as the same: programs such as ``timeout`` signal a process, then its whole group.
    """

    def __init__(self) -> None:
        self._rosters: list[Roster] = []
        self._is_stopping = False
        self._last = float("-inf")
        self._previous: dict[
            int, signal.Handlers | Callable[[int, FrameType | None], object] | int | None
        ] = {}

    def takes_along(self, roster: Roster) -> None:
        """Kill this roster's children too when the end is forced."""
        self._rosters.append(roster)

    def install(self) -> None:
        """Take the signals; again after a library took them."""
        for number in (signal.SIGINT, signal.SIGTERM):
            found = signal.signal(number, self._handle)
            self._previous.setdefault(number, found)

    def begin_stopping(self) -> None:
        """From here on a signal forces the end."""
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
            for roster in self._rosters:
                roster.kill_all()
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
