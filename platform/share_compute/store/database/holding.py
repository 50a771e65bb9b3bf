"""Exclusive use of a database by one server: a lock, a watchdog, and a fencing epoch (see `fence`).

The lock keeps a second server from starting. It is released when the process ends. On PostgreSQL, the lock is also lost
with its connection, e.g. when PostgreSQL restarts. Then the watchdog takes the lock again, unless another server has
taken it.
"""

from __future__ import annotations

import fcntl
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

from sqlalchemy import Connection, Engine, NullPool, create_engine, text
from sqlalchemy.exc import DBAPIError

from share_compute.errors import Conflict, Fenced, Unavailable
from share_compute.store.database.fence import Claim, fenced, valid_claim

_SERVERS_LOCK = 0x5C_0002
"""Key of the server's advisory lock in PostgreSQL; migrations use another key."""
_CHECK_S = 1.0
_ANSWER_S = 2
"""Seconds within which PostgreSQL must answer the watchdog; afterwards the connection counts as lost."""
_log = logging.getLogger(__name__)


class Lock(Protocol):
    """Lock that keeps other servers from a database."""

    def check(self) -> Claim | None:
        """Take the lock again if it was lost; return the claim that is valid now, or None if its row is missing.

        Raises:
            Conflict: another server has the lock.
            Unavailable: the database does not answer.
        """

    def close(self) -> None:
        """Release the lock."""


class _NoLock:
    """Lock of an in-memory database, which no other process can reach."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def check(self) -> Claim | None:
        with self._engine.connect() as connection:
            return valid_claim(connection)

    def close(self) -> None:
        pass


class _FileLock(_NoLock):
    """Lock of an SQLite database: a lock on a file next to the database.

    A server that reaches the database by another path, or over a network, may not see the lock.
    """

    def __init__(self, engine: Engine, file: IO[str]) -> None:
        super().__init__(engine)
        self._file = file

    def close(self) -> None:
        self._file.close()


class _PostgresLock:
    """PostgreSQL advisory lock, held by a separate connection."""

    def __init__(self, engine: Engine) -> None:
        # Short timeouts, so that a dead connection to an unreachable machine is noticed.
        deadlines = {"connect_timeout": _ANSWER_S, "tcp_user_timeout": 1000 * _ANSWER_S}
        settings = {"options": f"-c statement_timeout={1000 * _ANSWER_S}"}
        self._engine = create_engine(
            engine.url,
            connect_args={**deadlines, **settings},
            poolclass=NullPool,
            isolation_level="AUTOCOMMIT",
        )
        self._connection: Connection | None = None
        self.take()

    def take(self) -> None:
        connection = self._engine.connect()
        if not connection.scalar(text("SELECT pg_try_advisory_lock(:lock)"), {"lock": _SERVERS_LOCK}):
            connection.close()
            raise _taken(self._engine.url.database or "")
        self._connection = connection

    def check(self) -> Claim | None:
        try:
            if self._connection is None:
                self.take()
                _log.warning("the lock of the database was lost with its connection; it is held again")
            assert self._connection is not None
            return valid_claim(self._connection)
        except DBAPIError as failure:
            self._drop()
            raise Unavailable(f"the database does not answer: {str(failure.orig).strip()}") from failure

    def _drop(self) -> None:
        if self._connection is not None:
            with suppress(DBAPIError):
                self._connection.invalidate()
                self._connection.close()
            self._connection = None

    def close(self) -> None:
        if self._connection is not None:
            # Unlock explicitly: PostgreSQL may notice a closed connection only after the next server has started.
            with suppress(DBAPIError):  # a broken connection no longer holds the lock
                self._connection.execute(text("SELECT pg_advisory_unlock(:lock)"), {"lock": _SERVERS_LOCK})
            self._drop()
        self._engine.dispose()


def take_lock(engine: Engine) -> Lock:
    """Lock the database of an engine for one server, and return the lock.

    Raises:
        Conflict: another server has locked the database.
        Unavailable: the lock file next to the database cannot be written.
    """
    if engine.dialect.name == "postgresql":
        return _PostgresLock(engine)
    name = engine.url.database
    return (
        _FileLock(engine, _lock_file(Path(f"{name}.lock")))
        if name and name != ":memory:"
        else _NoLock(engine)
    )


def _lock_file(path: Path) -> IO[str]:
    try:
        lock = path.open("w")
    except OSError as failure:
        raise Unavailable(
            f"{path} cannot be written: {failure.strerror}", hint="fix the rights of the database's folder"
        ) from failure
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as failure:
        lock.close()
        raise _taken(path.with_suffix("").name) from failure
    return lock


def _taken(name: str) -> Conflict:
    return Conflict(
        f"another server uses the database {name} already",
        hint="stop that one, or give this one a database of its own with --database-url",
    )


class Watchdog:
    """Thread that checks periodically whether this server still holds the database, and takes a lost lock again.

    Args:
        lock: lock of the database.
        claim: claim of this server.
        lost: called in the thread, at most once, when another server has the database or the claim's row is missing.
        check_s: seconds between two checks.
    """

    def __init__(
        self, lock: Lock, claim: Claim, lost: Callable[[Fenced], None], check_s: float = _CHECK_S
    ) -> None:
        self._lock = lock
        self._claim = claim
        self._lost = lost
        self._check_s = check_s
        self._ended = threading.Event()
        self._is_away = False
        self._thread = threading.Thread(target=self._run, name="watches-the-database", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._check_s):
            try:
                valid = self._lock.check()
            except Conflict as failure:
                self._lost(
                    Fenced(
                        f"this server lost its lock of the database, and {failure.message}",
                        hint="use that one; or stop that one and start this one again with `share-compute up`",
                    )
                )
                return
            except (Unavailable, DBAPIError) as failure:
                if not self._is_away:
                    _log.warning("the lock of the database cannot be checked: %s", failure)
                self._is_away = True
                continue
            self._is_away = False
            if valid != self._claim:
                self._lost(fenced(self._claim, valid))
                return
