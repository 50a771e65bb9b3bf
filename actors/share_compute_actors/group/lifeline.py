"""Ends the process of a member that has received no heartbeat request for too long."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from share_compute_actors.machine.launch import ABSENCE_S

_log = logging.getLogger(__name__)


class Lifeline:
    """Ends this process if too much time passes without a call of `pull`.

    Args:
        limit_s: longest time without a call of `pull`, in seconds.
        end: ends the process.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        limit_s: float = ABSENCE_S,
        end: Callable[[], None] = lambda: os._exit(0),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s = limit_s
        self._end = end
        self._clock = clock
        self._pulled_s = clock()
        self._cut = threading.Event()
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def pull(self) -> None:
        """Restart the time limit."""
        self._pulled_s = self._clock()

    def cut(self) -> None:
        """Stop watching, so that this object no longer ends the process."""
        self._cut.set()

    def _watch(self) -> None:
        while not self._cut.wait(max(0.0, self._pulled_s + self._limit_s - self._clock())):
            if self._clock() - self._pulled_s >= self._limit_s:
                _log.warning("no call arrived in %.0f s: this process exits", self._limit_s)
                self._end()
                return
