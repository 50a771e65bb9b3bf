"""Heartbeats of machines, which are kept in memory and written to the database together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final, TypeVar

from sqlalchemy import bindparam, update

from share_compute.store.database.database import Database
from share_compute.store.database.tables import ContributorRow
from share_compute.store.records import PresenceRecord

_KEPT: Final = timedelta(minutes=1)
"""Time for which a written heartbeat stays in memory: longer than any read that began before it was written."""
_UPDATE: Final = (
    update(ContributorRow)
    .where(ContributorRow.id == bindparam("machine"))
    .values(last_seen_at=bindparam("seen_at"))
)
Presence = TypeVar("Presence", bound=PresenceRecord)


class Heartbeats:
    """Times of the machines' last heartbeats.

    A transaction for each heartbeat would make the disk the limit of the number of machines. So heartbeats are noted in
    memory, and `write` stores all new ones in one transaction. Reads of the store return the times in memory. Times are
    lost only if the server crashes; the next server then counts missing heartbeats from its own start.

    Args:
        database: the database with the machines.
        clock: function that returns the current time in UTC.
    """

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        self._latest: dict[str, datetime] = {}
        self._unwritten: dict[str, datetime] = {}

    def note(self, contributor_id: str) -> None:
        """Record that a machine was heard from now, without access to the database."""
        now = self._clock()
        with self._lock:
            self._latest[contributor_id] = self._unwritten[contributor_id] = now

    def latest(self, contributor_id: str, stored: datetime) -> datetime:
        """Return the time at which a machine was last heard from; ``stored`` is the time in its row."""
        return self._latest.get(contributor_id, stored)

    def updated(self, record: Presence) -> Presence:
        """Return a record that was read from a machine's row, with the time of the machine's last heartbeat."""
        seen_at = self.latest(record.id, record.last_seen_at)
        return (
            record if seen_at == record.last_seen_at else record.model_copy(update={"last_seen_at": seen_at})
        )

    def write(self) -> None:
        """Write the times that are not in the database yet, in one transaction. After a failure, keep them.

        Raises:
            Unavailable: the database does not answer.
            Fenced: another server took over the database.
        """
        with self._lock:
            batch, self._unwritten = self._unwritten, {}
        if not batch:
            return
        rows = [{"machine": machine, "seen_at": seen_at} for machine, seen_at in batch.items()]
        try:
            with self._database.write() as session:
                session.connection().execute(_UPDATE, rows)
        except Exception:
            with self._lock:
                self._unwritten = batch | self._unwritten
            raise
        oldest = self._clock() - _KEPT
        with self._lock:
            self._latest = {
                machine: seen_at
                for machine, seen_at in self._latest.items()
                if seen_at > oldest or machine in self._unwritten
            }
