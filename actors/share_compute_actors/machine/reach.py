"""Whether other hosts can be reached over the network from here. Free of Ray and torch."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Collection

_ANSWERS = (0, errno.ECONNREFUSED)
"""A host that refuses a connection is there."""


def any_reachable(places: Collection[tuple[str, int]], within_s: float = 1.0) -> bool:
    """Return whether a connection to one of these TCP ports is answered; connects to all at once.

    The kernel of a host answers, however busy its programs are.

    Args:
        places: IP address and port of each.
        within_s: how long that may take.
    """
    deadline_s = time.monotonic() + within_s
    with selectors.DefaultSelector() as selector:
        try:
            for address, port in places:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                connection = socket.socket(family, socket.SOCK_STREAM)
                selector.register(connection, selectors.EVENT_WRITE)
                connection.settimeout(0.0)
                if connection.connect_ex((address, port)) in _ANSWERS:
                    return True
            while selector.get_map() and (left_s := deadline_s - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    connection = _socket(key)
                    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS:
                        return True
                    selector.unregister(connection)
                    connection.close()
            return False
        finally:
            for key in list(selector.get_map().values()):
                _socket(key).close()


def _socket(key: selectors.SelectorKey) -> socket.socket:
    assert isinstance(key.fileobj, socket.socket)
    return key.fileobj
