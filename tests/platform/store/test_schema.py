from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect, text

from share_compute.errors import Conflict, Unavailable, UserError
from share_compute.planning.plan import Plan
from share_compute.scopes import Scope
from share_compute.specification import parse_job
from share_compute.store import Store, migrations, upgrade
from share_compute.store.database.database import Database, migration_config
from share_compute.store.database.tables import Base
from share_compute.store.secret import digest


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
    with closing(Database(url)) as database, database.read() as session:
        connection = session.connection()
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 10_000}


def test_one_server_holds_a_database(open_store: Callable[[], Store]) -> None:
    first, second = open_store(), open_store()
    first.hold()
    first.hold()
    with pytest.raises(Conflict, match="another server uses the database") as caught:
        second.hold()
    assert "--database-url" in (caught.value.hint or "")
    second.keys.create("others may read and write")
    first.close()
    second.hold()


def test_a_migration_does_not_change_with_the_tables() -> None:
    (folder,) = migrations.__path__
    for file in Path(folder, "versions").glob("0*.py"):
        assert "share_compute" not in file.read_text()


def test_a_pool_without_free_connections_is_unavailable(database_url: str) -> None:
    with closing(Database(database_url)) as database:
        database.engine.dispose()
        database.engine = create_engine(database_url, pool_size=1, max_overflow=0, pool_timeout=0.01)
        with (
            database.engine.connect(),
            pytest.raises(Unavailable, match="does not answer"),
            database.read() as session,
        ):
            session.connection()


@pytest.mark.parametrize("url", ["nonsense", "mysql://host/name"])
def test_other_databases_are_refused_with_a_hint(url: str) -> None:
    with pytest.raises(UserError) as caught:
        upgrade(url)
    assert "postgresql+psycopg" in (caught.value.hint or "")


def test_a_database_that_does_not_answer_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        upgrade("postgresql+psycopg://nobody@127.0.0.1:1/none")


def test_jobs_of_the_second_tables_have_no_times_of_layers_yet(database_url: str) -> None:
    engine = create_engine(database_url)
    job = parse_job({"model": {"layers": [{"type": "relu"}]}, "data": {"dataset": "digits"}})
    with engine.begin() as connection:
        command.upgrade(migration_config(connection), "0002")
        connection.execute(
            text(
                "INSERT INTO jobs (id, name, kind, state, reason, spec, attempt, step, total_steps, created_at) "
                "VALUES ('job-1', 'n', 'train', 'failed', 'r', :spec, 1, 0, 1, '2026-01-31 12:00:00')"
            ),
            {"spec": job.model_dump_json()},
        )
    engine.dispose()
    upgrade(database_url)
    store = Store(database_url)
    assert store.progress.timings("job-1") == {}
    assert store.jobs.get("job-1").fruitless_attempts == 0
    assert store.jobs.resume("job-1").attempt == 2
    store.close()


def test_plans_of_the_first_tables_are_still_read(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    engine = create_engine(url)
    member = {"contributor_id": "c", "name": "c", "microbatches": [0, 1], "memory_bytes": 1, "reason": ""}
    stage = {"start": 0, "stop": 1, "parameters": 1, "members": [member]}
    plan = {
        "epoch": 0,
        "strategy": "uniform",
        "num_layers": 1,
        "parameters": 1,
        "pools": [stage],
        "idle": ["spare"],
    }
    job = parse_job({"model": {"layers": [{"type": "relu"}]}, "data": {"dataset": "digits"}})
    with engine.begin() as connection:
        command.upgrade(migration_config(connection), "0001")
        connection.execute(
            text(
                "INSERT INTO jobs (id, name, kind, state, reason, spec, plan, attempt, step, total_steps, created_at) "
                "VALUES ('job-1', 'n', 'train', 'failed', 'r', :spec, :plan, 1, 0, 1, '2026-01-31 12:00:00')"
            ),
            {"spec": job.model_dump_json(), "plan": json.dumps(plan)},
        )
        connection.execute(
            text(
                "INSERT INTO events (job_id, attempt, kind, at, data) "
                "VALUES ('job-1', 1, 'planned', '2026-01-31 12:00:00', :data)"
            ),
            {"data": json.dumps({"plan": plan})},
        )
    engine.dispose()
    upgrade(url)
    store = Store(url)
    kept = store.jobs.get("job-1").plan
    in_event = Plan.model_validate(store.events.after(0)[0].data["plan"])
    store.close()
    assert kept == in_event
    assert kept is not None
    assert kept.microbatches == 2
    assert [machine.name for machine in kept.idle] == ["spare"]


def test_keys_of_before_become_admin_and_rows_of_before_belong_to_nobody(database_url: str) -> None:
    engine = create_engine(database_url)
    job = parse_job({"model": {"layers": [{"type": "relu"}]}, "data": {"dataset": "digits"}})
    key = "sck_of_before"
    with engine.begin() as connection:
        command.upgrade(migration_config(connection), "0008")
        connection.execute(
            text(
                "INSERT INTO api_keys (id, name, key_hash, created_at) "
                "VALUES ('key-1', 'operator', :key_hash, '2026-01-31 12:00:00')"
            ),
            {"key_hash": digest(key)},
        )
        connection.execute(
            text(
                "INSERT INTO jobs (id, name, kind, state, reason, spec, attempt, step, total_steps, created_at) "
                "VALUES ('job-1', 'n', 'train', 'failed', 'r', :spec, 1, 0, 1, '2026-01-31 12:00:00')"
            ),
            {"spec": job.model_dump_json()},
        )
    engine.dispose()
    upgrade(database_url)
    store = Store(database_url)
    admin = store.keys.verify(key)
    other = store.keys.create("new", [Scope.submit])[0]
    kept = store.jobs.get("job-1")
    store.close()
    assert admin is not None
    assert admin.scopes == (Scope.admin,)
    assert kept.owner is None
    assert (admin.owns(kept.owner), other.owns(kept.owner)) == (True, False)
