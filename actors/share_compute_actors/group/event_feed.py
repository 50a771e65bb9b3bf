"""Queues events until their listener has received them."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Generic, TypeVar

Event = TypeVar("Event")


class EventFeed(Generic[Event]):
    """A queue of events for one listener; any thread may add events."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._received = 0
        self._news = threading.Condition()

    def put(self, events: Collection[Event]) -> None:
        """Add events."""
        if events:
            with self._news:
                self._events.extend(events)
                self._news.notify_all()

    def pull(self, after: int, timeout_s: float) -> list[Event]:
        """Return all events that were added after the first ``after`` events.

        If there are none, wait up to ``timeout_s`` seconds for the next event; return an empty list if none is added.
        ``after`` must never decrease, because each call discards the first ``after`` events.
        """
        with self._news:
            self._news.wait_for(lambda: self._received + len(self._events) > after, timeout_s)
            del self._events[: after - self._received]
            self._received = after
            return list(self._events)
