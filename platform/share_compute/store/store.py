"""The store: the server's persistent state as one object, with an attribute for each group of rows."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from datetime import UTC, datetime

from share_compute.errors import Fenced
from share_compute.store.cluster import ClusterRows
from share_compute.store.contributors import Contributors
from share_compute.store.database.database import Database
from share_compute.store.database.fence import server_name
from share_compute.store.database.holding import Lock, Watchdog
from share_compute.store.deletion import Deletions
from share_compute.store.deployments import Deployments
from share_compute.store.derived.chains import Chains
from share_compute.store.derived.sweeps import Sweeps
from share_compute.store.events import Events
from share_compute.store.heartbeats import Heartbeats
from share_compute.store.invites import Invites
from share_compute.store.jobs import Jobs
from share_compute.store.keys import ApiKeys
from share_compute.store.leases import Leases
from share_compute.store.progress import Progress
from share_compute.store.retention import Retention
from share_compute.store.streams import StreamLog
from share_compute.store.work import WorkHistory

_log = logging.getLogger(__name__)


def utc_now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


class Store:
    """Persistent state of the server.

    Args:
        url: SQLAlchemy URL of a database whose schema is up to date (`upgrade`).
        clock: function that returns the current time in UTC.
    """

    def __init__(self, url: str, *, clock: Callable[[], datetime] = utc_now) -> None:
        self.url = url
        """SQLAlchemy URL of the database, for tools that open connections of their own."""
        self._database = Database(url)
        self._lock: Lock | None = None
        self._watchdog: Watchdog | None = None
        self._fence_listeners: list[Callable[[Fenced], None]] = []
        self.fenced: Fenced | None = None
        """Error that says why this server may no longer write; None while it may write."""
        self.clock = clock
        self.keys = ApiKeys(self._database, clock)
        self.invites = Invites(self._database, clock)
        self.heartbeats = Heartbeats(self._database, clock)
        self.contributors = Contributors(self._database, clock, self.heartbeats)
        self.jobs = Jobs(self._database, clock)
        self.chains = Chains(self._database, clock)
        self.sweeps = Sweeps(self._database, clock)
        self.deployments = Deployments(self._database, clock)
        self.leases = Leases(self._database, clock, self.heartbeats)
        self.progress = Progress(self._database, clock)
        self.events = Events(self._database, clock)
        self.work = WorkHistory(self._database, clock)
        self.cluster = ClusterRows(self._database, clock, self.heartbeats)
        self.deletions = Deletions(self._database, clock)
        self.retention = Retention(self._database, clock)
        self.streams = StreamLog(self._database, clock)

    @property
    def kind(self) -> str:
        """Return the kind of the database: ``sqlite`` or ``postgresql``."""
        return self._database.kind

    def on_commit(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after each commit that wrote events, in the same thread; return a function to remove it."""
        return self._database.on_commit(listener)

    def lock(self) -> None:
        """Lock the database against other servers until `close`; the system releases the lock when the process ends.

        Raises:
            Conflict: another server has locked the database.
            Unavailable: the database does not answer, or the lock file next to it cannot be written.
        """
        if self._lock is None:
            self._lock = self._database.lock()

    def hold(self, *, check_s: float = 1.0) -> None:
        """Lock and claim the database for this server until `close`.

        If another server takes over nevertheless, write transactions of this server raise `Fenced`, and the listeners
        of `on_fenced` are called.

        Args:
            check_s: seconds between two checks whether the database is still held.

        Raises:
            Conflict: another server holds the database.
            Unavailable: the database does not answer, or the lock file next to it cannot be written.
        """
        if self._watchdog is None:
            self.lock()
            assert self._lock is not None
            claimed = self._database.claim(server_name(socket.gethostname(), os.getpid()), self.clock())
            self._watchdog = Watchdog(self._lock, claimed, self._lose, check_s)

    def on_fenced(self, listener: Callable[[Fenced], None]) -> None:
        """Call ``listener`` in the watchdog's thread when ``fenced`` is set, or now if ``fenced`` is set already."""
        self._fence_listeners.append(listener)
        if self.fenced is not None:
            listener(self.fenced)

    def _lose(self, failure: Fenced) -> None:
        _log.error("%s; this server ends", failure.message)
        self.fenced = failure
        for listener in tuple(self._fence_listeners):
            listener(failure)

    def close(self) -> None:
        """Write the last heartbeats, close all connections, and release the database if it is held."""
        if self.fenced is None:
            try:
                self.heartbeats.write()
            except Exception as failure:  # noqa: BLE001 - the lock is released in any case
                _log.warning("the last heartbeats were not written: %s", failure)
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        self._database.close()
