"""Tests whether this host can reach other hosts over the network.

This module imports neither Ray nor torch.
"""

from __future__ import annotations

import errno
import selectors
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Literal

Place = tuple[str, int]
"""IP address and TCP port."""
Answer = Literal["open", "refused"]
_TRIES, _TRY_S = 2, 1.2
"""Number of tries, and time limit of each in seconds. TCP repeats a lost connection request after 1 s."""
_AT_ONCE = 256
_POLL_S = 0.05
_RESET = struct.pack("ii", 1, 0)
"""Value of ``SO_LINGER`` with which closing a socket resets its connection."""


def answers(
    places: Collection[Place], within_s: float = 1.0, *, until_first: bool = False
) -> dict[Place, Answer]:
    """Connect to all places in parallel; return the answer of each place that answered: open or refused.

    A host's kernel answers even if its programs are busy. A refusal means that the host is reachable, but no program
    listens on the port.

    Args:
        places: IP addresses and TCP ports to connect to.
        within_s: time limit in seconds.
        until_first: whether to stop after the first answers instead of waiting for all places.
    """
    deadline_s = time.monotonic() + within_s
    found: dict[Place, Answer] = {}
    with selectors.DefaultSelector() as selector:
        try:
            for place in set(places):
                family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
                connection = socket.socket(family, socket.SOCK_STREAM)
                connection.settimeout(0.0)
                if (failure := connection.connect_ex(place)) in (0, errno.EINPROGRESS):
                    selector.register(connection, selectors.EVENT_WRITE, place)
                    continue
                if failure == errno.ECONNREFUSED:
                    found[place] = "refused"
                connection.close()
            while selector.get_map() and not (found and until_first):
                ready = selector.select(max(0.0, deadline_s - time.monotonic()))
                # Sockets that are ready count even after the deadline, because this process may have been suspended.
                if not ready:
                    break
                for key, _ in ready:
                    connection = _socket(key)
                    failure = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if failure in (0, errno.ECONNREFUSED):
                        found[key.data] = "refused" if failure else "open"
                    selector.unregister(connection)
                    connection.close()
            return found
        finally:
            for key in list(selector.get_map().values()):
                _socket(key).close()


def unanswered(places: Collection[Place]) -> frozenset[Place]:
    """Return the places that do not answer in two tries. The call takes at most 2.4 s."""
    unresponsive = frozenset(places)
    for _ in range(_TRIES):
        unresponsive -= answers(unresponsive, _TRY_S).keys()
    return unresponsive


@contextmanager
def listening(address: str, ports: Collection[int], handshake: bytes) -> Iterator[None]:
    """Inside the block, listen on ports and send a handshake on each connection, for other hosts that test the ports.

    If this side closed a connection first, the port would stay in TIME-WAIT for a minute (RFC 9293, 3.6). Ray would
    then count the port as busy, and end the worker that needs it. So this side waits until the other side closes the
    connection, and resets connections that are open at the end of the block.

    Args:
        address: IP address to listen at.
        ports: TCP ports.
        handshake: handshake that is sent on each connection.

    Raises:
        OSError: a port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    is_over = threading.Event()
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for port in ports:
            listener = stack.enter_context(socket.create_server((address, port), family=family))
            listener.setblocking(False)  # noqa: FBT003 - it takes no keyword
            selector.register(listener, selectors.EVENT_READ)

        def accept(listener: socket.socket) -> None:
            connection = stack.enter_context(listener.accept()[0])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            connection.setblocking(False)  # noqa: FBT003
            connection.sendall(handshake)
            selector.register(connection, selectors.EVENT_READ, connection)

        def send_handshakes() -> None:
            while not is_over.is_set():
                for key, _ in selector.select(_POLL_S):
                    with suppress(OSError):
                        if key.data is None:
                            accept(_socket(key))
                        else:
                            selector.unregister(key.data)
                            key.data.close()

        thread = threading.Thread(target=send_handshakes, name="handshakes", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def closed_ports(
    address: str, ports: Collection[int], handshake: bytes, within_s: float = 3.0
) -> tuple[int, ...]:
    """Return the ports on which the expected handshake does not arrive, in ascending order.

    Such a port cannot be reached, or another program listens on it.

    Args:
        address: IP address to connect to.
        ports: TCP ports.
        handshake: handshake that is expected on each connection.
        within_s: time limit for each port, in seconds. Up to 256 ports are tried at once.
    """

    def is_closed(port: int) -> bool:
        try:
            with socket.create_connection((address, port), timeout=within_s) as connection:
                received = b""
                while len(received) < len(handshake) and (part := connection.recv(len(handshake))):
                    received += part
        except OSError:
            return True
        return received != handshake

    ordered = sorted(ports)
    with ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="dial") as threads:
        found = threads.map(is_closed, ordered)
        return tuple(port for port, closed in zip(ordered, found, strict=True) if closed)


def _socket(key: selectors.SelectorKey) -> socket.socket:
    assert isinstance(key.fileobj, socket.socket)
    return key.fileobj
