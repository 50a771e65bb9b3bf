"""The TCP connections under one gloo group, so that an operation that waits on them can be ended from outside.

Gloo offers no way to end a blocked operation, and its peers may be alive and silent for ever. When the connections
are shut down underneath, every operation on them fails within milliseconds, here and at the other ends.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Collection
from contextlib import suppress

import psutil

_Connection = tuple[int, tuple[str, int], tuple[str, int] | None]
"""Descriptor, own address, other end's address; None of a listening one."""


def listening_ports() -> set[int]:
    """Return the TCP ports on which this process listens."""
    return {own[1] for _, own, other in _connections() if other is None}


class GroupSockets:
    """Second descriptors of a group's connections: they stay valid whatever gloo does with its own."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._is_shut = False

    @property
    def is_shut(self) -> bool:
        """Whether the connections were ended here."""
        return self._is_shut

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
            self._sockets += found
            is_late = self._is_shut
        if is_late:
            self.shut()

    def shut(self) -> None:
        """End all connections; may be called from any thread, and again."""
        with self._lock:
            self._is_shut = True
            sockets, self._sockets = self._sockets, []
        for each in sockets:
            with suppress(OSError):  # the other end went first
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def _connections() -> list[_Connection]:
    return [
        (each.fd, (each.laddr[0], each.laddr[1]), (each.raddr[0], each.raddr[1]) if each.raddr else None)
        for each in psutil.Process().net_connections("tcp")
        if each.fd >= 0
    ]


def _second(descriptor: int, own: tuple[str, int], other: tuple[str, int]) -> socket.socket | None:
    """Return a socket of our own on the same connection; None when it was closed since it was listed."""
    try:
        taken = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    with suppress(OSError):
        # The number may stand for something else by now.
        if taken.getsockname()[1] == own[1] and taken.getpeername()[1] == other[1]:
            return taken
    taken.close()
    return None
