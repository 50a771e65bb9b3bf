"""Both databases, for real: SQLite in a file, and PostgreSQL, which is started here if it is installed."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.orm import Session
from tests.held_ports import HeldPort
from tests.programs import missing

from share_compute.store import Store, upgrade
from share_compute.store.database.database import Database


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 31, 12, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@cache
def _migrated() -> tempfile.TemporaryDirectory[str]:
    """Return a folder with an SQLite file that has the newest schema and no rows; it is removed at the end."""
    folder = tempfile.TemporaryDirectory(prefix="sc-")
    upgrade(f"sqlite:///{folder.name}/store.db")
    return folder


def make_schema(url: str) -> None:
    """Give an empty database the newest schema. SQLite files are copies of one file that `upgrade` migrated."""
    address = make_url(url)
    if address.get_backend_name() != "sqlite":
        upgrade(url)
        return
    assert address.database
    file = Path(address.database)
    assert not file.exists(), f"{file} is not empty"
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(_migrated().name) / "store.db", file)


@contextmanager
def writing(store: Store) -> Iterator[Session]:
    """Open a write transaction of another server, which has claimed nothing, in the database of a store."""
    with closing(Database(store.url)) as database, database.write() as session:
        yield session


@contextmanager
def reading(store: Store) -> Iterator[Session]:
    """Open a read transaction of another server in the database of a store."""
    with closing(Database(store.url)) as database, database.read() as session:
        yield session


class PostgresServer:
    """A PostgreSQL of our own, on loopback.

    Args:
        programs: folder with its programs.
        account: of the system that runs it; None for our own.
    """

    def __init__(self, programs: Path, account: str | None) -> None:
        self._programs = programs
        self._as_account = ["runuser", "-u", account, "--"] if account else []
        # Its socket's path must be short, and its account must be able to reach the folder.
        self._folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
        if account:
            os.chown(self._folder, pwd.getpwnam(account).pw_uid, pwd.getpwnam(account).pw_gid)
        self._port = HeldPort()
        self.url = f"postgresql+psycopg://postgres@127.0.0.1:{self._port.number}"
        self._run("initdb", "-U", "postgres", "-A", "trust", "-N")
        self.start()

    def start(self) -> None:
        options = f"-p {self._port.number} -h 127.0.0.1 -k {self._folder} -F"
        self._run("pg_ctl", "-o", options, "-l", str(self._folder / "log"), "-w", "start")

    def stop(self) -> None:
        """Kill it without notice, as a power cut would."""
        self._run("pg_ctl", "-m", "immediate", "-w", "stop")

    def restart(self) -> None:
        self.stop()
        self.start()

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self._folder)

    def create_database(self) -> str:
        """Make an empty database and return its URL."""
        name = f"test_{os.urandom(4).hex()}"
        self._say(f"CREATE DATABASE {name}")
        return f"{self.url}/{name}"

    def drop_database(self, url: str) -> None:
        self._say(f"DROP DATABASE {make_url(url).database} WITH (FORCE)")

    def cut_connections(self, url: str) -> None:
        """Close all connections to a database."""
        name = make_url(url).database
        self._say(f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = '{name}'")

    def _say(self, statement: str) -> None:
        engine = create_engine(f"{self.url}/postgres", isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(statement))
        engine.dispose()

    def _run(self, program: str, *words: str) -> None:
        command = [*self._as_account, str(self._programs / program), "-D", str(self._folder / "data"), *words]
        subprocess.run(command, check=True, capture_output=True, cwd=self._folder)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        pytest.skip(missing("PostgreSQL's server"))
    account = "postgres" if os.geteuid() == 0 else None
    if account and all(entry.pw_name != account for entry in pwd.getpwall()):
        pytest.skip(missing("PostgreSQL's account postgres"))
    server = PostgresServer(programs[-1], account)
    yield server
    server.remove()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'store.db'}"
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    url = server.create_database()
    yield url
    server.drop_database(url)


@pytest.fixture
def open_store(database_url: str, clock: Clock) -> Iterator[Callable[[], Store]]:
    """Return a function that opens the same database again."""
    make_schema(database_url)
    opened: list[Store] = []

    def open_one() -> Store:
        opened.append(Store(database_url, clock=clock))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()
