"""The store: one object with one attribute for each table."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from share_compute.store.contributors import Contributors
from share_compute.store.database import Database
from share_compute.store.deployments import Deployments
from share_compute.store.events import Events
from share_compute.store.holding import Hold
from share_compute.store.invites import Invites
from share_compute.store.jobs import Jobs
from share_compute.store.keys import ApiKeys
from share_compute.store.leases import Leases
from share_compute.store.pool import PoolRows
from share_compute.store.progress import Progress
from share_compute.store.work import Work


def utc_now() -> datetime:
    """Return this moment in UTC."""
    return datetime.now(UTC)


class Store:
    """All that the server remembers. Every method is one transaction and may be called from any thread.

    Args:
        url: SQLAlchemy URL of a database whose schema is up to date (`upgrade`).
        clock: tells the time, in UTC.
    """

    def __init__(self, url: str, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._database = Database(url)
        self._held: Hold | None = None
        self.clock = clock
        self.keys = ApiKeys(self._database, clock)
        self.invites = Invites(self._database, clock)
        self.contributors = Contributors(self._database, clock)
        self.jobs = Jobs(self._database, clock)
        self.deployments = Deployments(self._database, clock)
        self.leases = Leases(self._database, clock)
        self.progress = Progress(self._database, clock)
        self.events = Events(self._database, clock)
        self.work = Work(self._database, clock)
        self.pool = PoolRows(self._database, clock)

    @property
    def kind(self) -> str:
        """``sqlite`` or ``postgresql``."""
        return self._database.kind

    def on_commit(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after each commit of an event, in its thread; returns what ends that."""
        return self._database.on_commit(listener)

    def hold(self) -> None:
        """Keep the database for this server alone until `close`; the system lets go when the process ends.

        Two servers on one database would each take the other's jobs for lost and run them again.

        Raises:
            Conflict: another server holds it.
            Unavailable: the database, or the folder of its file, cannot be used.
        """
        if self._held is None:
            self._held = self._database.hold()

    def close(self) -> None:
        """Give all connections back, and the database if it is held."""
        if self._held is not None:
            self._held.close()
            self._held = None
        self._database.close()
