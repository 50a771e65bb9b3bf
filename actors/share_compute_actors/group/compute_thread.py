"""The one thread of a member that computes, and the queue of functions that other threads have it run."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from share_compute_actors.transport.channel import Channel

Result = TypeVar("Result")
Order: TypeAlias = tuple[Callable[[], Any], Future[Any]]
"""A function to run on the compute thread, and the future that its caller waits for."""


class ComputeThread(ABC):
    """A member's compute thread. All access to weights and to the channel happens on it.

    A subclass calls `_start` at the end of its constructor. Its `_loop` takes orders with `_next_order` and runs them
    with `run_order`, whenever it has nothing more urgent to do.
    """

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self._news = threading.Condition()
        """Guards what other threads leave here, and tells the thread of it."""
        self._orders: deque[Order] = deque()

    def order(self, work: Callable[[], Result]) -> Result:
        """Run a function on the compute thread, and return its result; called on another thread."""
        future: Future[Result] = Future()
        with self._news:
            self._orders.append((work, future))
            self._news.notify()
        self._end_wait()
        return future.result()

    def open(self, channel: Channel | None) -> None:
        """Use this channel from now on, and close the one before; call it through `order`."""
        with self._news:
            old, self.channel = self.channel, channel
        if old is not None:
            old.close()

    def _start(self) -> None:
        threading.Thread(target=self._loop, name="compute", daemon=True).start()

    @abstractmethod
    def _loop(self) -> None:
        """Work until the process ends."""

    def _end_wait(self) -> None:
        """End the thread's wait for a tensor, if a new order must not wait for that tensor as well."""

    def _next_order(self) -> Order | None:
        """Return the oldest order and remove it, None if there is none; the caller holds `_news`."""
        return self._orders.popleft() if self._orders else None


def run_order(order: Order) -> None:
    """Run a function, and give its result or its error to its caller."""
    work, future = order
    try:
        future.set_result(work())
    except BaseException as failure:  # noqa: BLE001 - the caller of `order` receives it
        future.set_exception(failure)
