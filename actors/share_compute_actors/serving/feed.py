"""What a deployment's server tells of its sequences, kept until the control plane has it."""

from __future__ import annotations

import threading
from collections.abc import Collection

from share_compute.serving.events import SequenceEvent


class Feed:
    """Events in order, for one listener; any thread may put some."""

    def __init__(self) -> None:
        self._events: list[SequenceEvent] = []
        self._received = 0
        self._news = threading.Condition()

    def put(self, events: Collection[SequenceEvent]) -> None:
        """Tell something."""
        if events:
            with self._news:
                self._events.extend(events)
                self._news.notify_all()

    def pull(self, after: int, timeout_s: float) -> list[SequenceEvent]:
        """Return the events that followed the first ``after`` ones; waits for the next if there is none.

        ``after`` never goes back: what the listener has received is not kept.
        """
        with self._news:
            self._news.wait_for(lambda: self._received + len(self._events) > after, timeout_s)
            del self._events[: after - self._received]
            self._received = after
            return list(self._events)
