"""With two servers on one database exactly one writes, even if the lock between them is lost."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import create_engine, text
from tests.conftest import wait_for
from tests.databases import PostgresServer, clock, database_url, open_store, postgres_server, writing

from share_compute.errors import Conflict, Fenced, Unavailable
from share_compute.store import Store, upgrade
from share_compute.store.database.database import Database
from share_compute.store.database.fence import claim
from share_compute.store.keys import ApiKeys
from share_compute_actors.machine.processes import is_alive

__all__ = ["clock", "database_url", "open_store", "postgres_server"]

DEADLINE_S = 60.0


def why_fenced(store: Store) -> Fenced:
    """Wait until a server is fenced, and return why; fail if it does not notice that."""
    noticed = threading.Event()
    store.on_fenced(lambda _failure: noticed.set())
    assert noticed.wait(DEADLINE_S), "the server did not notice that another one has its database"
    assert store.fenced is not None
    return store.fenced


@contextmanager
def claimed_by(holder: str, store: Store) -> Iterator[ApiKeys]:
    """Claim a store's database for another server, which ignores its lock; yield the API keys as it has them."""
    with closing(Database(store.url)) as newer:
        newer.claim(holder, store.clock())
        yield ApiKeys(newer, store.clock)


def names(store: Store) -> list[str]:
    return [key.name for key in store.keys.list()]


def test_of_two_servers_without_a_common_lock_only_the_last_one_writes(
    open_store: Callable[[], Store],
) -> None:
    older = open_store()
    older.hold()
    older.keys.create("before")
    # The lock of the older server is not seen, as over a network, or through another path.
    with claimed_by("another host, process 7", older) as keys:
        with pytest.raises(Fenced, match="another server \\(another host, process 7\\)") as refused:
            older.keys.create("after")
        assert "stop that one" in (refused.value.hint or "")
        keys.create("of the newer one")
    assert sorted(names(older)) == ["before", "of the newer one"]
    assert "another host" in why_fenced(older).message


def test_every_transaction_that_writes_is_fenced(open_store: Callable[[], Store]) -> None:
    older = open_store()
    older.hold()
    _, code = older.invites.create(label="kept", expires_in_s=60)
    with claimed_by("newer", older):
        pass
    for write in (
        lambda: older.events.record("alert", {}),
        lambda: older.invites.create(label="late", expires_in_s=60),
        lambda: older.leases.keep_only([]),
        lambda: older.jobs.requeue_interrupted("restarted"),
        lambda: older.keys.revoke("key-none"),
    ):
        with pytest.raises(Fenced):
            write()
    assert older.events.last_seq() == 0
    assert code


def test_a_transaction_that_waited_for_its_turn_is_fenced_by_the_one_before(
    open_store: Callable[[], Store],
) -> None:
    older = open_store()
    older.hold()
    failures: list[BaseException] = []

    def write() -> None:
        try:
            older.keys.create("late")
        except BaseException as failure:  # noqa: BLE001 - checked below
            failures.append(failure)

    with writing(older) as session:
        thread = threading.Thread(target=write)
        thread.start()
        claim(session.connection(), "newer", older.clock())
    thread.join(DEADLINE_S)
    assert [type(failure) for failure in failures] == [Fenced]
    assert names(older) == []


def test_a_server_whose_epoch_is_gone_writes_nothing(open_store: Callable[[], Store]) -> None:
    store = open_store()
    store.hold()
    with writing(store) as session:
        session.execute(text("DELETE FROM server_epoch"))
    with pytest.raises(Fenced, match="lost the row"):
        store.keys.create("none")


def test_a_store_that_holds_nothing_writes_as_before(open_store: Callable[[], Store]) -> None:
    store = open_store()
    store.keys.create("one")
    server = open_store()
    server.hold()
    store.keys.create("two")
    assert sorted(names(server)) == ["one", "two"]


# -- PostgreSQL that restarts ------------------------------------------------------------------------------------------


@pytest.fixture
def restartable(postgres_server: PostgresServer) -> Iterator[tuple[PostgresServer, str]]:
    """A PostgreSQL with an empty database of our tables; both are restored at the end."""
    url = postgres_server.create_database()
    upgrade(url)
    yield postgres_server, url
    postgres_server.drop_database(url)


def is_locked(url: str) -> bool:
    """Return whether a server has the lock of a database, without a try to take it, which could be in the way."""
    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            locks = connection.exec_driver_sql(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"
                " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            )
            return locks.scalar_one() > 0
    finally:
        engine.dispose()


@pytest.mark.postgres
def test_a_server_takes_its_lock_again_after_postgresql_restarted(
    restartable: tuple[PostgresServer, str],
) -> None:
    postgres, url = restartable
    with closing(Store(url)) as store, closing(Store(url)) as late:
        store.hold(check_s=0.05)
        postgres.restart()

        wait_for(lambda: is_locked(url), "the lock is held again")
        store.keys.create("continues")
        assert store.fenced is None
        with pytest.raises(Conflict, match="another server uses the database"):
            late.hold()


@pytest.mark.postgres
def test_two_servers_that_want_one_postgresql_after_its_restart(
    restartable: tuple[PostgresServer, str],
) -> None:
    postgres, url = restartable
    older, newer = Store(url), Store(url)
    with closing(older), closing(newer):
        older.hold()
        postgres.stop()
        with pytest.raises(Unavailable):
            newer.hold()
        postgres.start()
        try:
            newer.hold()
        except Conflict:
            winner, loser = older, newer
        else:
            winner, loser = newer, older
            assert "another server" in why_fenced(older).message
            with pytest.raises(Fenced):
                loser.keys.create("of the loser")
        winner.keys.create("of the winner")
        assert names(winner) == ["of the winner"]


@pytest.mark.slow
@pytest.mark.postgres
def test_the_older_server_is_fenced_when_its_connection_is_cut(
    restartable: tuple[PostgresServer, str],
) -> None:
    postgres, url = restartable
    older, newer = Store(url), Store(url)
    with closing(older), closing(newer):
        older.hold(check_s=5.0)
        postgres.cut_connections(url)
        newer.hold()  # before the older one checks its claim
        with pytest.raises(Fenced):
            older.keys.create("of the older one")
        assert why_fenced(older).exit_code == 4
        newer.keys.create("of the newer one")
        assert names(newer) == ["of the newer one"]


# -- a whole server ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_that_was_replaced_ends_and_says_why(tmp_path: Path, run_server: Any) -> None:
    with run_server(tmp_path) as server:
        process = psutil.Process(server.command.process.pid)
        family = process.children(recursive=True)
        database = tmp_path / "share-compute.db"
        with closing(sqlite3.connect(database, timeout=60)) as other:
            other.execute("UPDATE server_epoch SET epoch = epoch + 1, holder = 'another host, process 7'")
            other.commit()
        status = server.command.process.wait(DEADLINE_S)
        assert status == Fenced.exit_code == 4
        said = server.command.json_lines()[-1]["error"]
        assert said["code"] == "fenced"
        assert "another server (another host, process 7) took over the database" in said["detail"]
        assert "share-compute up" in said["hint"]
        assert not any(is_alive(one) for one in family)
