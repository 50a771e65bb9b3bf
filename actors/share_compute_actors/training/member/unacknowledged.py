"""Keeps a member's messages until its coordinator has acknowledged them."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

_LATE_S = 0.7
"""Time in seconds after which an unacknowledged message is repeated."""
_MOST = 64
"""Maximum number of messages that are kept. If there are more, the oldest is dropped."""


class _Sent(NamedTuple):
    call: Any
    """Reference that is ready once the coordinator's method has returned or failed."""
    sent_s: float
    key: bytes
    message: bytes


class Unacknowledged:
    """Keeps messages until they are acknowledged, so that heartbeats can repeat them.

    After a cut of the network, a call to the coordinator may hang or be lost. Heartbeats use another
    connection, which the coordinator opens.
    """

    def __init__(self) -> None:
        self._sent: deque[_Sent] = deque(maxlen=_MOST)
        self._lock = threading.Lock()

    def add(self, call: Any, key: bytes, message: bytes) -> None:
        """Keep a message.

        Args:
            call: the reference that the call with this message returned.
            key: the secret that was sent with the message.
            message: the packed message, as it was sent.
        """
        with self._lock:
            self._drop_acknowledged()
            self._sent.append(_Sent(call, time.monotonic(), key, message))

    def overdue(self) -> tuple[tuple[bytes, bytes], ...]:
        """Return (key, message) of each kept message that was sent more than 0.7 s ago, oldest first.

        An acknowledged message is kept until all earlier messages are acknowledged.
        """
        with self._lock:
            self._drop_acknowledged()
            late_s = time.monotonic() - _LATE_S
            return tuple((sent.key, sent.message) for sent in self._sent if sent.sent_s < late_s)

    def clear(self) -> None:
        """Drop all messages, because another coordinator takes over."""
        with self._lock:
            self._sent.clear()

    def _drop_acknowledged(self) -> None:
        while self._sent and _is_acknowledged(self._sent[0].call):
            self._sent.popleft()


def _is_acknowledged(call: Any) -> bool:
    if not ray.wait([call], timeout=0)[0]:
        return False
    try:
        ray.get(call)
    except RayError:
        return False
    return True
