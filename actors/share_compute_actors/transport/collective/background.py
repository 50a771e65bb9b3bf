"""A thread that runs background tasks one at a time, and does not delay the exit of its process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class BackgroundTasks:
    """Executor with one thread. Unlike the standard library's executors, it never waits for hanging tasks at exit.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._is_over = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Queue ``work`` to run after all earlier tasks; return its future.

        Raises:
            RuntimeError: `end` was called.
        """
        if self._is_over:
            raise RuntimeError("this background thread has ended")
        future: Future[Any] = Future()
        self._queue.put((work, future))
        return future

    def end(self) -> None:
        """Cancel all tasks that have not started, and end the thread after the current task."""
        self._is_over = True
        self._queue.put(None)

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while (task := self._queue.get()) is not None:
            work, future = task
            if self._is_over:
                future.cancel()
                continue
            try:
                future.set_result(work())
            except BaseException as failure:  # noqa: BLE001 - the future reports it to its waiter
                future.set_exception(failure)
            del task, work, future  # an idle thread must not keep tensors alive
