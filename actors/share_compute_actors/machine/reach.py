"""Whether other hosts can be reached over the network from here. Free of Ray and torch."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Collection
from typing import Literal

Place = tuple[str, int]
"""IP address and TCP port."""
Answer = Literal["open", "refused"]
_TRIES, _TRY_S = 2, 2.5
"""TCP repeats a connect that was lost after 1 s."""


def answers(places: Collection[Place], within_s: float = 1.0) -> dict[Place, Answer]:
    """Connect to all places at once; return what answered.

    The kernel of a host answers, however busy its programs are. A host that refuses is there, and nobody listens.

    Args:
        places: where to connect.
        within_s: how long that may take.
    """
    deadline_s = time.monotonic() + within_s
    found: dict[Place, Answer] = {}
    with selectors.DefaultSelector() as selector:
        try:
            for place in set(places):
                family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
                connection = socket.socket(family, socket.SOCK_STREAM)
                selector.register(connection, selectors.EVENT_WRITE, place)
                connection.settimeout(0.0)
                connection.connect_ex(place)
            while selector.get_map() and (left_s := deadline_s - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
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
    """Return the places that do not answer, although they are tried again; within five seconds."""
    silent = frozenset(places)
    for _ in range(_TRIES):
        silent -= answers(silent, _TRY_S).keys()
    return silent


def _socket(key: selectors.SelectorKey) -> socket.socket:
    assert isinstance(key.fileobj, socket.socket)
    return key.fileobj
