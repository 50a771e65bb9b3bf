"""Access to the database: transactions, migrations, and translation of errors to `share_compute.errors`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json  # several times faster than json.loads
from sqlalchemy import Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, DatabaseError, DataError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from share_compute.errors import Conflict, Unavailable, UserError
from share_compute.store.database.fence import Claim, claim, fenced, take_turn
from share_compute.store.database.holding import Lock, take_lock

if TYPE_CHECKING:
    from alembic.config import Config

_BUSY_TIMEOUT_S = 10.0
_MIGRATIONS_LOCK = 0x5C_0001
"""Key of the PostgreSQL advisory lock that serializes migrations; an arbitrary number."""


def open_engine(url: str) -> Engine:
    """Return an engine for a SQLAlchemy URL; create the folder of an SQLite file.

    Raises:
        UserError: the URL is invalid, or of neither SQLite nor PostgreSQL.
    """
    try:
        parsed = make_url(url)
    except ArgumentError as failure:
        raise UserError(f"{url!r} is not a database URL", hint=_URL_HINT) from failure
    kind = parsed.get_backend_name()
    if kind == "sqlite":
        if parsed.database and parsed.database != ":memory:":
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(parsed, connect_args={"timeout": _BUSY_TIMEOUT_S}, json_deserializer=from_json)
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    if kind != "postgresql":
        raise UserError(f"the database {kind!r} is not supported", hint=_URL_HINT)
    return create_engine(
        parsed.set(drivername="postgresql+psycopg"), pool_pre_ping=True, json_deserializer=from_json
    )


_URL_HINT = "use sqlite:///file or postgresql+psycopg://user:password@host/name"


def _prepare_sqlite(connection: Any, record: Any) -> None:
    del record
    # The driver's own BEGIN is deferred: if two transactions read and then write, one of them would fail.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")  # a committed row survives a power cut
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


HAS_EVENTS = "has_events"
"""Key in ``Session.info`` of the flag that says whether the transaction wrote an event."""


class Database:
    """Opens read transactions, and one write transaction at a time."""

    def __init__(self, url: str) -> None:
        self.engine = open_engine(url)
        self.kind = self.engine.dialect.name
        self._writing_engine = self.engine.execution_options(writes=True)
        self._listeners: list[Callable[[], None]] = []
        self._claim: Claim | None = None

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Open a transaction that commits nothing."""
        with translated(), Session(self.engine, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Open a transaction that commits at the end of the block, and rolls back when the block raises.

        Listeners are notified only if the transaction wrote an event.

        Write transactions are serialized, on PostgreSQL too. Otherwise an event could become visible after one with a
        higher number, and readers that continue from the highest number seen would miss it.

        Raises:
            Fenced: another server claimed the database after this one, or the row of the claim is gone.
        """
        with translated(), Session(self._writing_engine, expire_on_commit=False) as session, session.begin():
            valid = take_turn(session.connection())
            if self._claim is not None and valid != self._claim:
                raise fenced(self._claim, valid)
            yield session
        if session.info.get(HAS_EVENTS):
            for listener in tuple(self._listeners):
                listener()

    def on_commit(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after each commit that wrote events, in the same thread; return a function to remove it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def lock(self) -> Lock:
        """Lock the database against other servers; return the lock, which lasts until its `close` is called."""
        with translated():
            return take_lock(self.engine)

    def claim(self, holder: str, now: datetime) -> Claim:
        """Claim the database for this object; from now on, write transactions of earlier claimants raise `Fenced`."""
        with self.write() as session:
            claimed = claim(session.connection(), holder, now)
        self._claim = claimed
        return claimed

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


@contextmanager
def translated() -> Iterator[None]:
    """Translate database errors that the block raises to errors of share-compute."""
    try:
        yield
    except DataError as failure:
        raise UserError(
            f"a value cannot be stored: {str(failure.orig).strip()}", hint="take out characters like NUL"
        ) from failure
    except (OperationalError, InterfaceError, PoolTimeout) as failure:
        cause = getattr(failure, "orig", None) or failure
        raise Unavailable(
            f"the database does not answer: {str(cause).strip()}",
            hint="check that it runs, that its disk is not full, and --database-url",
        ) from failure
    except DatabaseError as failure:
        if type(failure) is not DatabaseError:
            raise  # a violated constraint or an invalid statement: a defect in share-compute
        raise Unavailable(
            f"the database is damaged: {str(failure.orig).strip()}",
            hint="stop the server and put a backup back: share-compute restore FILE",
        ) from failure


def migration_config(connection: Connection | None = None) -> Config:
    """Return Alembic's configuration for the migrations inside this package."""
    from alembic.config import Config  # noqa: PLC0415 - slow, and most starts of a server need no migration

    config = Config()
    config.set_main_option("script_location", "share_compute.store:migrations")
    config.attributes["connection"] = connection
    return config


def newest_revision() -> str:
    """Return the newest Alembic revision of the migrations in this package, from the names of their files."""
    folder = Path(__file__).parents[1] / "migrations" / "versions"
    return max(file.name.partition("_")[0] for file in folder.glob("[0-9]*.py"))


def revision(url: str) -> str | None:
    """Return the Alembic revision of a database's schema; None if no revision is recorded."""
    engine = open_engine(url)
    try:
        with translated(), engine.connect() as connection:
            if not inspect(connection).has_table("alembic_version"):
                return None
            found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
            return None if found is None else str(found)
    finally:
        engine.dispose()


def upgrade(url: str) -> None:
    """Migrate the schema of a database to the newest version; do nothing if it is up to date.

    Raises:
        Conflict: a newer version made the schema.
        Unavailable: the database does not answer, or is damaged.
        UserError: the URL is invalid, or of neither SQLite nor PostgreSQL.
    """
    from alembic import command  # noqa: PLC0415 - slow
    from alembic.util.exc import CommandError  # noqa: PLC0415

    engine = open_engine(url)
    try:
        with translated(), engine.execution_options(writes=True).begin() as connection:
            if engine.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATIONS_LOCK})
            command.upgrade(migration_config(connection), "head")
    except CommandError as failure:
        raise Conflict(
            f"this version of share-compute cannot read its database: {failure}",
            hint="install the newest version that ran with it, or choose another --data-folder",
        ) from failure
    finally:
        engine.dispose()
