"""Table of a server's open connections; idle and half-open connections are closed when there are too many."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network
from math import inf
from typing import Final, Protocol

_SPARE: Final = 64
"""Number of connections beyond the limit that are accepted, so that uvicorn can answer them with status 503."""
_SHARE_OF_TRUSTED: Final = 2
_LOG_PERIOD_S: Final = 60.0
_log = logging.getLogger(__name__)


class Connection(Protocol):
    """One client's connection."""

    def check(self, now_s: float) -> None:
        """Close the connection if its client is too slow."""

    def drop(self) -> None:
        """Close the connection now; called only while it is half-open or idle (see `ConnectionTable`)."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits that keep a few clients from taking all connections of a server."""

    connections: int
    """Maximum number of simultaneous connections."""
    half_open_per_address: int
    """Maximum number of connections from one address (`address_group`) whose request head is incomplete."""
    head_s: float
    """Time limit for the TLS handshake and the head of a request together, in seconds."""
    stall_s: float
    """Period over which the speed of a request body or a response is averaged, in seconds."""
    least_bytes_per_s: int
    """Minimum mean speed over each period of ``stall_s``, in bytes per second."""


class ResponsiveClock:
    """A clock that counts only the time in which the event loop runs, for deadlines of clients.

    A client must not miss its deadline because the server is too busy to read. So the clock counts at most ``most_s``
    of the time between two ticks. The event loop reads from all connections between two ticks. If ``most_s`` is a tenth
    of a deadline, the loop reads about ten times before the deadline passes, however long each iteration takes.

    Args:
        now_s: time of the event loop, in seconds.
        most_s: maximum time to count between two ticks, in seconds.
    """

    def __init__(self, now_s: float, most_s: float) -> None:
        self._ticked_s = now_s
        self._counted_s = 0.0
        self._most_s = most_s

    def read(self, now_s: float) -> float:
        """Return the counted time for a time of the event loop; both are in seconds."""
        return self._counted_s + min(now_s - self._ticked_s, self._most_s)

    def tick(self, now_s: float) -> float:
        """Start to count the next interval, and return the counted time in seconds."""
        self._counted_s, self._ticked_s = self.read(now_s), now_s
        return self._counted_s


class ConnectionTable:
    """Counts connections by address, and closes the oldest idle or half-open ones when there are too many.

    A connection is half-open (its request head is incomplete), idle (kept alive after a response), or busy. When an
    address has as many half-open connections as allowed, a new connection replaces the oldest of them. At the limit of
    all connections, the oldest idle connection is closed. If none is idle, the oldest half-open connection of the
    address with the most half-open connections is closed.

    Args:
        limits: the limits to enforce.
        is_trusted: returns whether an address is a loopback address or a reverse proxy's. Such an address may
            have more half-open connections, because many clients may share it.
    """

    def __init__(self, limits: ConnectionLimits, is_trusted: Callable[[str], bool]) -> None:
        self.limits = limits
        self._is_trusted = is_trusted
        self._open: dict[Connection, str] = {}
        self._half_open: dict[str, dict[Connection, None]] = {}
        self._idle: dict[Connection, None] = {}
        self._dropped = 0
        self._logged_s = -inf

    def __len__(self) -> int:
        """Return the number of open connections."""
        return len(self._open)

    def admit(self, connection: Connection, address: str) -> bool:
        """Add a new connection as half-open, and close older ones at a limit; return False to refuse the new one."""
        group = address_group(address)
        if len(self._open) >= self.limits.connections:
            self._drop_oldest()
        if len(self._open) >= self.limits.connections + _SPARE:
            self._dropped += 1
            return False
        most = self.limits.half_open_per_address
        if self._is_trusted(address):
            most = max(most, self.limits.connections // _SHARE_OF_TRUSTED)
        waiting = self._half_open.get(group, {})
        if len(waiting) >= most:
            self._drop(next(iter(waiting)))
        self._open[connection] = group
        self._half_open.setdefault(group, {})[connection] = None
        return True

    def half_open(self, connection: Connection) -> None:
        """Record that a connection began to send the head of a request."""
        self._leave(connection)
        if (group := self._open.get(connection)) is not None:
            self._half_open.setdefault(group, {})[connection] = None

    def busy(self, connection: Connection) -> None:
        """Record that a connection sent the complete head of a request."""
        self._leave(connection)

    def idle(self, connection: Connection) -> None:
        """Record that a connection got its response and is kept alive."""
        self._leave(connection)
        if connection in self._open:
            self._idle[connection] = None

    def replace(self, old: Connection, new: Connection) -> None:
        """Replace ``old`` by ``new``, which starts as half-open."""
        if (group := self._open.get(old)) is not None:
            self.forget(old)
            self._open[new] = group
            self._half_open.setdefault(group, {})[new] = None

    def forget(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self._leave(connection)
        self._open.pop(connection, None)

    def check(self, now_s: float) -> None:
        """Call each connection's `check`, which closes the connection if its client is too slow."""
        for connection in list(self._open):
            connection.check(now_s)
        if self._dropped and now_s - self._logged_s > _LOG_PERIOD_S:
            _log.warning(
                "closed %d connections that sent no request, to free places for others", self._dropped
            )
            self._dropped, self._logged_s = 0, now_s

    def _drop_oldest(self) -> None:
        if self._idle:
            self._drop(next(iter(self._idle)))
        elif self._half_open:
            _, group = max((len(waiting), group) for group, waiting in self._half_open.items())
            self._drop(next(iter(self._half_open[group])))

    def _drop(self, connection: Connection) -> None:
        self._dropped += 1
        self.forget(connection)
        connection.drop()

    def _leave(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        group = self._open.get(connection)
        if group is not None and group in self._half_open:
            self._half_open[group].pop(connection, None)
            if not self._half_open[group]:
                del self._half_open[group]


def address_group(address: str) -> str:
    """Return the key by which an address's connections are counted: the /64 network for IPv6, else the address."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        if not found.is_loopback:
            return str(ip_network((found, 64), strict=False))
    return str(found)


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return found.is_loopback


def is_within(address: str, networks: Iterable[str]) -> bool:
    """Return whether an address lies in one of ``networks``; each of them may also be a single address."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found in ip_network(network, strict=False) for network in networks)
