"""Closes TCP connections of Ray that wait to retransmit although the other host can be reached again.

TCP doubles the time before each retransmission (RFC 6298, 5.5). So after a network cut of 30 s, a connection may stay
idle for another 25 s, and Ray's calls wait for it. A new connection works at once, and gRPC opens a new one when the
old one is closed.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from share_compute_actors.machine.reach import Place, answers

_PERIOD_S = 0.5
_LOST_IN_SUCCESSION = 3
"""Number of consecutive retransmissions or probes without acknowledgement after which a connection counts as stalled.

TCP waits at least 0.2 s before the first retransmission, and twice as long before each further one. So the third
follows after at least 0.2 + 0.4 + 0.8 = 1.4 s."""
_ANSWER_S = 0.4
"""Time limit for the other host to answer a new connection, in seconds."""
_ESTABLISHED = 1
_TCP_INFO = struct.Struct("4B")
"""First fields of Linux's ``struct tcp_info``: state, congestion state, retransmissions, and probes.

Retransmissions and probes are counted since the last acknowledgement. TCP probes if it cannot send, for example because
of a firewall on this host."""
_log = logging.getLogger(__name__)


@cache
def close_stalled_connections() -> None:
    """Start a thread that closes stalled connections of this process; repeated calls are harmless.

    On systems other than Linux, do nothing.
    """
    if sys.platform == "linux":
        threading.Thread(target=_watch, name="stalled-connections", daemon=True).start()


def _watch() -> None:
    while True:
        time.sleep(_PERIOD_S)
        with suppress(OSError):  # for example too many open files: the next round may succeed
            close_stalled()


def close_stalled() -> int:
    """Close each stalled connection whose peer answers a new connection; return the number of closed connections."""
    with _stalled() as stalled:
        reachable = answers(set(stalled.values()), _ANSWER_S) if stalled else {}
        closed = 0
        for connection, peer in stalled.items():
            # Check again, because the connection may have recovered.
            if peer in reachable and _is_stalled(connection):
                with suppress(OSError):  # closed meanwhile
                    connection.shutdown(socket.SHUT_RDWR)
                    closed += 1
                    _log.info("closed a connection to %s that was stalled after a network cut", peer[0])
        return closed


@contextmanager
def _stalled() -> Iterator[dict[socket.socket, Place]]:
    """Yield duplicates of the stalled connections, with their peers; other threads may close the originals."""
    with ExitStack() as stack:
        found: dict[socket.socket, Place] = {}
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # closed meanwhile, or not a socket
                duplicate = os.dup(int(entry.name))
                try:
                    connection = socket.socket(fileno=duplicate)
                except OSError:
                    os.close(duplicate)
                    continue
                if not _is_stalled(connection):
                    connection.close()
                    continue
                stack.enter_context(connection)
                host, port = connection.getpeername()[:2]
                found[connection] = host.removeprefix("::ffff:"), port
        yield found


def _is_stalled(connection: socket.socket) -> bool:
    if connection.type != socket.SOCK_STREAM or connection.family not in {socket.AF_INET, socket.AF_INET6}:
        return False
    options: Any = socket
    # gRPC sets this option on all its connections. ZeroMQ and gloo do not set it; closing their connections would lose
    # messages.
    if not connection.getsockopt(socket.IPPROTO_TCP, options.TCP_USER_TIMEOUT):
        return False
    known = connection.getsockopt(socket.IPPROTO_TCP, options.TCP_INFO, _TCP_INFO.size)
    state, _, retransmissions, probes = _TCP_INFO.unpack(known)
    return bool(state == _ESTABLISHED and max(retransmissions, probes) >= _LOST_IN_SUCCESSION)
