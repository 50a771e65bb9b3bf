from __future__ import annotations

from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect

from share_compute.errors import Unavailable, UserError
from share_compute.store import Store, upgrade
from share_compute.store.tables import Base


def test_migrations_make_the_tables_that_the_models_say(database_url: str) -> None:
    upgrade(database_url)
    engine = create_engine(database_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_upgrading_twice_changes_nothing(database_url: str) -> None:
    upgrade(database_url)
    upgrade(database_url)
    engine = create_engine(database_url)
    assert set(Base.metadata.tables) < set(inspect(engine).get_table_names())
    engine.dispose()


def test_sqlite_keeps_what_was_committed_through_a_power_cut(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'deep' / 'folder' / 'store.db'}"
    upgrade(url)
    store = Store(url)
    with store._database.read() as session:
        connection = session.connection()
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    store.close()
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 10_000}


@pytest.mark.parametrize("url", ["nonsense", "mysql://host/name"])
def test_other_databases_are_refused_with_a_mend(url: str) -> None:
    with pytest.raises(UserError) as caught:
        upgrade(url)
    assert "postgresql+psycopg" in (caught.value.mend or "")


def test_a_database_that_does_not_answer_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        upgrade("postgresql+psycopg://nobody@127.0.0.1:1/none")
