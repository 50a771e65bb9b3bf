"""The compute thread of a member, and the queue of functions that other threads submit to it."""

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
"""A function to run on the compute thread, and the future for its result."""


class ComputeThread(ABC):
    """A member's compute thread, which runs the functions that other threads pass to `order`.

    A subclass calls `_start` at the end of its constructor. Its `_loop` takes orders with `_next_order` and runs them
    with `_run_order`. The channel's methods that are not thread-safe may be called on this thread only.

    Args:
        on_failure: called on this thread with each exception of its work, before the exception is reported.
    """

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self.channel: Channel | None = None
        self._news = threading.Condition()
        """Guards the state that other threads change, such as `_orders`, and wakes the compute thread."""
        self._orders: deque[Order] = deque()

    def order(self, work: Callable[[], Result]) -> Result:
        """Run a function on the compute thread, and return its result or raise its error.

        The compute thread itself must not call this method.
        """
        future: Future[Result] = Future()
        with self._news:
            self._orders.append((work, future))
            self._news.notify()
        self._end_wait()
        return future.result()

    def open(self, channel: Channel | None) -> None:
        """Replace the channel, and close the previous one; call this method through `order`."""
        with self._news:
            old, self.channel = self.channel, channel
        if old is not None:
            old.close()

    def _start(self) -> None:
        threading.Thread(target=self._loop, name="compute", daemon=True).start()

    @abstractmethod
    def _loop(self) -> None:
        """Run orders and the member's own work, forever."""

    def _end_wait(self) -> None:
        """Interrupt the compute thread's wait for a tensor, so that a new order runs sooner. By default, do nothing."""

    def _next_order(self) -> Order | None:
        """Remove and return the oldest order; None if there is none. The caller must hold `_news`."""
        return self._orders.popleft() if self._orders else None

    def _run_order(self, order: Order) -> None:
        """Run the function of an order, and set its result or its error on the order's future."""
        work, future = order
        try:
            future.set_result(work())
        except BaseException as failure:  # noqa: BLE001 - the caller of `order` receives it
            self._on_failure(failure)
            future.set_exception(failure)
