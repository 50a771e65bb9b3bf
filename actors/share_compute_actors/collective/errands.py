"""A thread that runs one thing after the other, and that a process need not wait for at its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class Errands:
    """What executors of the standard library do; but those wait, at the end of the process, for what hangs.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._is_over = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Run ``work`` when all before it is done.

        Raises:
            RuntimeError: `end` was called.
        """
        if self._is_over:
            raise RuntimeError("nothing more is run here")
        future: Future[Any] = Future()
        self._queue.put((work, future))
        return future

    def end(self) -> None:
        """Run nothing more; what waits is cancelled."""
        self._is_over = True
        self._queue.put(None)

    @property
    def has_ended(self) -> bool:
        """Whether what ran last is done."""
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while (errand := self._queue.get()) is not None:
            work, future = errand
            if self._is_over:
                future.cancel()
                continue
            try:
                future.set_result(work())
            except BaseException as failure:  # noqa: BLE001 - whoever waits is told
                future.set_exception(failure)
            del errand, work, future  # an idle thread holds nobody's tensors
