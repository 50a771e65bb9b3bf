"""Ends blocked operations of a gloo group by shutting down its TCP connections through duplicated descriptors.

Gloo cannot abort a blocked operation, and other members may be alive but unresponsive forever. After a shutdown, gloo
closes the connections within milliseconds at all members, and fails the operations that wait for a message. Operations
whose message had arrived in part do not fail: they wait until their deadline (``Pair::signalException`` of gloo's
``transport/tcp``). So code that waits for an operation must also check `GroupSockets.is_broken`.
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
"""File descriptor, own address, and the peer's address, which is None for a listening socket."""
_CLOSED_WITHIN_S = 0.25
"""Time limit for gloo to close connections after a shutdown, in seconds.

While gloo reads from a connection, it notices a shutdown in about a millisecond. Other connections may take longer."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A connection of gloo, with a duplicate of its descriptor."""

    socket: socket.socket
    descriptor: int
    """Gloo's own descriptor."""
    status: os.stat_result

    def is_open(self) -> bool:
        """Whether gloo's descriptor is still open, and was not reused for another file."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), self.status)
        except OSError:
            return False


def listening_ports() -> set[int]:
    """Return the TCP ports on which this process listens."""
    return {own[1] for _, own, other in _connections() if other is None}


class GroupSockets:
    """Duplicated descriptors of a group's connections; they stay valid when gloo closes its own descriptors."""

    def __init__(self) -> None:
        self._held: list[_Held] = []
        self._lock = threading.Lock()
        self._is_shut = False

    @property
    def is_shut(self) -> bool:
        """Whether `shut` was called."""
        return self._is_shut

    @property
    def is_broken(self) -> bool:
        """Whether a connection is closed; operations that wait on it can never finish."""
        with self._lock:
            return self._is_shut or not all(each.is_open() for each in self._held)

    def adopt(self, own_ports: Collection[int], other_ports: Collection[int]) -> None:
        """Add the connections that begin at one of ``own_ports`` or end at one of ``other_ports``.

        Connections that are added after `shut` are shut down at once.
        """
        found = [
            taken
            for descriptor, own, other in _connections()
            if other is not None and (own[1] in own_ports or other[1] in other_ports)
            if (taken := duplicated(descriptor, own, other)) is not None
        ]
        with self._lock:
            self._held += found
            is_late = self._is_shut
        if is_late:
            self.shut()

    def shut(self) -> None:
        """Shut down all connections. Thread-safe, and may be called again."""
        with self._lock:
            self._is_shut = True
            for each in self._held:
                with suppress(OSError):  # the peer has already closed the connection
                    each.socket.shutdown(socket.SHUT_RDWR)
                each.socket.close()

    def until_closed(self) -> None:
        """After `shut`, wait up to 0.25 s until gloo has closed its connections.

        Afterwards gloo cannot write received data into tensors.
        """
        until_s = time.monotonic() + _CLOSED_WITHIN_S
        while any(each.is_open() for each in self._held) and time.monotonic() < until_s:
            time.sleep(0.001)


def _connections() -> list[_Connection]:
    return [
        (each.fd, (each.laddr[0], each.laddr[1]), (each.raddr[0], each.raddr[1]) if each.raddr else None)
        for each in psutil.Process().net_connections("tcp")
        if each.fd >= 0
    ]


def duplicated(descriptor: int, own: tuple[str, int], other: tuple[str, int]) -> _Held | None:
    """Duplicate the descriptor of a connection; return None if the connection was closed after it was listed."""
    try:
        duplicate = os.dup(descriptor)
    except OSError:
        return None
    try:
        taken = socket.socket(fileno=duplicate)
    except OSError:  # the descriptor was reused for a file that is not a socket
        os.close(duplicate)
        return None
    with suppress(OSError):
        # The descriptor may have been reused for another socket. Names of Unix sockets have no port.
        is_tcp = taken.family in (socket.AF_INET, socket.AF_INET6)
        if is_tcp and taken.getsockname()[1] == own[1] and taken.getpeername()[1] == other[1]:
            return _Held(taken, descriptor, os.fstat(taken.fileno()))
    taken.close()
    return None
