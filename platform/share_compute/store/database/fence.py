"""Fencing token in the database: if several servers claim the database, only the last claimant can write.

A lock alone is not enough: its holder may be paused while another server takes the lock, and write when it resumes
(Kleppmann, "How to do distributed locking", 2016). So each claim increments an epoch. Each write transaction checks,
inside the transaction, that the newest epoch still belongs to its server.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from secrets import token_hex

from sqlalchemy import Connection, select, update

from share_compute.errors import Fenced
from share_compute.store.database.tables import ServerEpochRow

_SELECT = select(ServerEpochRow.epoch, ServerEpochRow.holder).where(ServerEpochRow.id == 1)
_LOCK = _SELECT.with_for_update()
"""Query that locks the claim's row. SQLite has no row locks: it ignores FOR UPDATE, and writers use BEGIN IMMEDIATE."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A server's claim to the database."""

    epoch: int
    """Number of claims so far, including this one; only the claimant with the newest epoch may write."""
    holder: str
    """Unique name of the server. It is needed because an epoch can repeat after an older database is restored."""


def server_name(host: str, pid: int) -> str:
    """Return a readable name for a server, unique even if the host name and the process id repeat."""
    return f"{host}, process {pid}, {token_hex(4)}"


def take_turn(connection: Connection) -> Claim:
    """Lock the row of the valid claim until the transaction ends, and return the claim.

    On PostgreSQL, this waits for other write transactions, and then reads the newest version of the row (READ
    COMMITTED).

    Raises:
        Fenced: the row of the claim does not exist.
    """
    row = connection.execute(_LOCK).first()
    if row is None:
        raise fenced(None, None)
    return Claim(row.epoch, row.holder)


def claim(connection: Connection, holder: str, now: datetime) -> Claim:
    """Claim the database, in a write transaction; earlier claimants can no longer write."""
    claimed = Claim(take_turn(connection).epoch + 1, holder)
    row = update(ServerEpochRow).where(ServerEpochRow.id == 1)
    connection.execute(row.values(epoch=claimed.epoch, holder=holder, claimed_at=now))
    return claimed


def valid_claim(connection: Connection) -> Claim | None:
    """Return the valid claim without waiting for writers; None if its row does not exist."""
    row = connection.execute(_SELECT).first()
    return None if row is None else Claim(row.epoch, row.holder)


def fenced(mine: Claim | None, valid: Claim | None) -> Fenced:
    """Return the error for a server that may no longer write."""
    if valid is None:
        return Fenced(
            "the database lost the row that says which server may write",
            hint="restore it from a backup: share-compute restore",
        )
    was = "" if mine is None else f"; this server had epoch {mine.epoch}"
    return Fenced(
        f"another server ({valid.holder}) took over the database at epoch {valid.epoch}{was}",
        hint="use that one; or stop that one and start this one again with `share-compute up`: jobs continue",
    )
