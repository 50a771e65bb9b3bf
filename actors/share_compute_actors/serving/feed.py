"""Events of a deployment's sequences, kept until the control plane has received them."""

from __future__ import annotations

import threading
from collections.abc import Collection

from share_compute.serving.events import SequenceEvent


class Feed:
    """A queue of events for one listener; any thread may add events."""

    def __init__(self) -> None:
        self._events: list[SequenceEvent] = []
        self._received = 0
        self._news = threading.Condition()

    def put(self, events: Collection[SequenceEvent]) -> None:
        """Add events."""
        if events:
            with self._news:
                self._events.extend(events)
                self._news.notify_all()

    def pull(self, after: int, timeout_s: float) -> list[SequenceEvent]:
        """Return the events after the first ``after`` ones; wait for the next if there are none.

        ``after`` must never decrease, because events that the listener has received are dropped.
        """
        with self._news:
            self._news.wait_for(lambda: self._received + len(self._events) > after, timeout_s)
            del self._events[: after - self._received]
            self._received = after
            return list(self._events)
