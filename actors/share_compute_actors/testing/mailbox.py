"""Receives members' messages for test processes and benchmarks, which are not Ray actors themselves."""

from __future__ import annotations

import queue
import threading
from typing import Any

import ray


@ray.remote(num_cpus=0, concurrency_groups={"mail": 1, "control": 1})
class Mailbox:
    """Actor that receives members' messages instead of a coordinator, and queues them."""

    def __init__(self) -> None:
        self._received: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    @ray.method(concurrency_group="mail")
    def receive(self, *said: Any) -> None:
        """Queue a message from a member."""
        self._received.put(said)

    @ray.method(concurrency_group="control")
    def next(self) -> tuple[Any, ...]:
        """Wait for the next message, remove it from the queue and return it."""
        return self._received.get()


def forward_mail(mailbox: Any) -> queue.SimpleQueue[Any]:
    """Start a thread that moves messages from a `Mailbox` to a queue; return the queue.

    The thread ends when a call of the mailbox fails, for example because its actor was killed.
    """
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def carry() -> None:
        while True:
            try:
                inbox.put(ray.get(mailbox.next.remote()))
            except ray.exceptions.RayError:
                return

    threading.Thread(target=carry, daemon=True).start()
    return inbox
