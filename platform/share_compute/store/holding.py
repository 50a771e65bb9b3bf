"""One server for one database: held by a lock that the system gives back when the process ends."""

from __future__ import annotations

import fcntl
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from share_compute.errors import Conflict, Unavailable

_SERVERS_LOCK = 0x5C_0002
"""PostgreSQL's advisory lock of the server; beside the one that writers take in turn."""


class Hold(Protocol):
    """A database that is held."""

    def close(self) -> None:
        """Let go of it."""


class _Nothing:
    """A database in memory, which nobody else can reach."""

    def close(self) -> None:
        pass


class _Held:
    """A database of PostgreSQL, held by a lock of this connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def close(self) -> None:
        # PostgreSQL sees a closed connection a little later, and whoever is next may come before that.
        with suppress(DBAPIError):  # it is broken, and the lock gone with it
            self._connection.execute(text("SELECT pg_advisory_unlock(:lock)"), {"lock": _SERVERS_LOCK})
        self._connection.close()


def hold(engine: Engine) -> Hold:
    """Hold the database of an engine.

    Raises:
        Conflict: another server holds it.
        Unavailable: a lock cannot be written beside the file.
    """
    if engine.dialect.name == "postgresql":
        return _hold_postgresql(engine)
    name = engine.url.database
    return _hold_file(Path(f"{name}.lock")) if name and name != ":memory:" else _Nothing()


def _hold_file(path: Path) -> Hold:
    try:
        lock = path.open("w")
    except OSError as failure:
        raise Unavailable(
            f"{path} cannot be written: {failure.strerror}", mend="mend the rights of the database's folder"
        ) from failure
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as failure:
        lock.close()
        raise _taken(path.with_suffix("").name) from failure
    return lock


def _hold_postgresql(engine: Engine) -> Hold:
    connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    # Out of the pool: the lock lives as long as the connection, so closing must end it, not hand it on.
    connection.detach()
    if not connection.scalar(text("SELECT pg_try_advisory_lock(:lock)"), {"lock": _SERVERS_LOCK}):
        connection.close()
        raise _taken(engine.url.database or "")
    return _Held(connection)


def _taken(name: str) -> Conflict:
    return Conflict(
        f"another server uses the database {name} already",
        mend="stop that one, or give this one a database of its own with --database-url",
    )
