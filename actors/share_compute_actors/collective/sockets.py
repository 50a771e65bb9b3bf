"""The TCP connections under one gloo group, so that an operation that waits on them can be ended from outside.

Gloo offers no way to end a blocked operation, and its peers may be alive and silent for ever. When the connections
are shut down underneath, gloo closes them within milliseconds, here and at the other ends, and fails the operations
that wait for a message. Those whose message was half through it forgets: they wait until their deadline
(``Pair::signalException`` of gloo's ``transport/tcp``), so whoever waits has to look whether the connections stand.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

import psutil

_Connection = tuple[int, tuple[str, int], tuple[str, int] | None]
"""Descriptor, own address, other end's address; None of a listening one."""
_CLOSED_WITHIN_S = 0.25
"""Gloo closes a connection that was shut down in a millisecond, if it is its turn to read there."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A connection of gloo's, and our second descriptor of it."""

    socket: socket.socket
    descriptor: int
    """Gloo's own."""
    status: os.stat_result

    def is_open(self) -> bool:
        """Whether gloo still has it: its number may stand for something else by now."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), self.status)
        except OSError:
            return False


def listening_ports() -> set[int]:
    """Return the TCP ports on which this process listens."""
    return {own[1] for _, own, other in _connections() if other is None}


class GroupSockets:
    """Second descriptors of a group's connections: they stay valid whatever gloo does with its own."""

    def __init__(self) -> None:
        self._held: list[_Held] = []
        self._lock = threading.Lock()
        self._is_shut = False

    @property
    def is_shut(self) -> bool:
        """Whether the connections were ended here."""
        return self._is_shut

    @property
    def is_broken(self) -> bool:
        """Whether a connection is gone: something may wait for it until its deadline, and nothing will come."""
        with self._lock:
            return self._is_shut or not all(each.is_open() for each in self._held)

    def adopt(self, own_ports: Collection[int], other_ports: Collection[int]) -> None:
        """Add the connections that begin at one of ``own_ports`` or end at one of ``other_ports``.

        Those that come after `shut` are shut down at once.
        """
        found = [
            taken
            for descriptor, own, other in _connections()
            if other is not None and (own[1] in own_ports or other[1] in other_ports)
            if (taken := _second(descriptor, own, other)) is not None
        ]
        with self._lock:
            self._held += found
            is_late = self._is_shut
        if is_late:
            self.shut()

    def shut(self) -> None:
        """End all connections; may be called from any thread, and again."""
        with self._lock:
            self._is_shut = True
            for each in self._held:
                with suppress(OSError):  # the other end went first
                    each.socket.shutdown(socket.SHUT_RDWR)
                each.socket.close()

    def until_closed(self) -> None:
        """After `shut`, return when gloo writes into nobody's tensors any more: what had come may still be read."""
        until_s = time.monotonic() + _CLOSED_WITHIN_S
        while any(each.is_open() for each in self._held) and time.monotonic() < until_s:
            time.sleep(0.001)


def _connections() -> list[_Connection]:
    return [
        (each.fd, (each.laddr[0], each.laddr[1]), (each.raddr[0], each.raddr[1]) if each.raddr else None)
        for each in psutil.Process().net_connections("tcp")
        if each.fd >= 0
    ]


def _second(descriptor: int, own: tuple[str, int], other: tuple[str, int]) -> _Held | None:
    """Return a socket of our own on the same connection; None when it was closed since it was listed."""
    try:
        taken = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    with suppress(OSError):
        # The number may stand for something else by now.
        if taken.getsockname()[1] == own[1] and taken.getpeername()[1] == other[1]:
            return _Held(taken, descriptor, os.fstat(taken.fileno()))
    taken.close()
    return None
