"""Backups of the embedded database: made during use, refused if they are incomplete, restored."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import create_engine

from share_compute.errors import Conflict, NotFound, Unavailable, UserError
from share_compute.store import Store, upgrade
from share_compute.store.database.backups import (
    back_up,
    dump_hint,
    embedded_file,
    prepare,
    require_sound,
    restore,
)
from share_compute.store.database.database import migration_config

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A database with a row, many enough to fill several pages."""
    file = tmp_path / "share-compute.db"
    upgrade(f"sqlite:///{file}")
    with closing(Store(f"sqlite:///{file}")) as store:
        for number in range(300):
            store.events.record("alert", {"number": number, "text": "x" * 200})
    return file


def num_events(file: Path) -> int:
    with closing(Store(f"sqlite:///{file}")) as store:
        return len(store.events.after(0))


def test_a_backup_is_made_while_the_database_is_used(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "backups" / "one.db"
    with closing(Store(f"sqlite:///{file}")) as store:
        store.hold()
        size_bytes = back_up(file, target)
        store.events.record("alert", {"number": 300})
    assert size_bytes == target.stat().st_size
    assert target.stat().st_mode & 0o077 == 0
    assert [one.name for one in target.parent.iterdir()] == ["one.db"], "one file, without a log"
    require_sound(target)
    assert num_events(target) == 300
    with pytest.raises(Conflict, match="exists already"):
        back_up(file, target)
    with pytest.raises(NotFound):
        back_up(tmp_path / "nothing", tmp_path / "two.db")


def test_what_is_restored_is_what_was_backed_up(file: Path, tmp_path: Path) -> None:
    url, target = f"sqlite:///{file}", tmp_path / "one.db"
    back_up(file, target)
    with closing(Store(url)) as store:
        store.events.record("alert", {"number": 300})
    before = target.read_bytes()
    replaced = restore(target, url, NOW)
    assert target.read_bytes() == before
    assert num_events(file) == 300
    assert replaced == tmp_path / "share-compute.db.replaced-20260131T120000"
    assert num_events(replaced) == 301
    assert not [one.name for one in tmp_path.iterdir() if one.name.startswith(".")]


def test_nothing_is_restored_under_a_running_server(file: Path, tmp_path: Path) -> None:
    url, target = f"sqlite:///{file}", tmp_path / "one.db"
    back_up(file, target)
    with closing(Store(url)) as store:
        store.hold()
        with pytest.raises(Conflict, match="another server uses the database"):
            restore(target, url, NOW)
        store.events.record("alert", {"number": 300})
    assert num_events(file) == 301
    assert not [one.name for one in tmp_path.iterdir() if "replaced" in one.name or one.name.startswith(".")]


def garbage_header(content: bytearray) -> bytes:
    return b"\x7fELF" + content[4:]


def truncated(content: bytearray) -> bytes:
    return bytes(content[: len(content) // 2])


def corrupted_page(content: bytearray) -> bytes:
    # The root pages stay valid; a page in the middle is overwritten.
    start = (len(content) // 4096 // 2) * 4096
    content[start : start + 4096] = b"\xa5" * 4096
    return bytes(content)


@pytest.mark.parametrize("damage", [garbage_header, truncated, corrupted_page])
def test_a_damaged_database_is_found_at_start_and_a_backup_replaces_it(
    file: Path, tmp_path: Path, damage: object
) -> None:
    url, backups = f"sqlite:///{file}", tmp_path / "backups"
    back_up(file, backups / "good.db")
    for name in ("-wal", "-shm"):
        file.with_name(file.name + name).unlink(missing_ok=True)
    spoilt = damage(bytearray(file.read_bytes()))  # type: ignore[operator]
    file.write_bytes(spoilt)
    with pytest.raises(Unavailable, match=r"share-compute\.db is damaged") as refused:
        prepare(url, backups, NOW)
    assert f"share-compute restore {backups / 'good.db'}" in (refused.value.hint or "")
    refusal = UserError if damage is garbage_header else Unavailable
    with pytest.raises(refusal, match="is no backup" if damage is garbage_header else "is damaged"):
        restore(file, f"sqlite:///{tmp_path / 'other.db'}", NOW)
    assert not (tmp_path / "other.db").exists()
    replaced = restore(backups / "good.db", url, NOW)
    assert replaced is not None
    assert replaced.read_bytes() == spoilt
    prepare(url, backups, NOW)
    assert num_events(file) == 300


def test_damage_that_is_met_later_says_what_to_do(file: Path) -> None:
    with closing(Store(f"sqlite:///{file}")) as store:
        content = bytearray(file.read_bytes())
        content[8192:] = b"\xa5" * (len(content) - 8192)
        file.write_bytes(content)
        with pytest.raises(Unavailable) as met:
            store.events.after(0, limit=5000)
    assert "share-compute restore" in (met.value.hint or "")


def test_what_is_no_backup_is_refused(file: Path, tmp_path: Path) -> None:
    url, other = f"sqlite:///{file}", tmp_path / "other.db"
    with pytest.raises(NotFound):
        restore(other, url, NOW)
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE cats (name TEXT)")
    readme = tmp_path / "README.md"
    for text in ("# share-compute", ""):
        readme.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=r"README\.md is no backup of share-compute") as refused:
            restore(readme, url, NOW)
        assert "share-compute backup" in (refused.value.hint or "")
    with pytest.raises(UserError, match="is no backup of share-compute"):
        restore(other, url, NOW)
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
        connection.execute("INSERT INTO alembic_version VALUES ('from-the-future')")
        connection.commit()
    with pytest.raises(Conflict, match="from-the-future"):
        restore(other, url, NOW)
    assert num_events(file) == 300


def test_a_backup_is_made_before_a_migration_and_the_newest_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, backups = tmp_path / "store.db", tmp_path / "backups"
    url = f"sqlite:///{file}"
    engine = create_engine(url)
    with engine.begin() as connection:
        command.upgrade(migration_config(connection), "0007")
    engine.dispose()
    shutil.copy(file, tmp_path / "old.db")
    for day in range(1, 9):
        shutil.copy(tmp_path / "old.db", file)
        with caplog.at_level(logging.WARNING):
            prepare(url, backups, NOW.replace(day=day))
    assert "a backup is" in caplog.text
    found = sorted(one.name for one in backups.iterdir())
    assert found == [f"before-migration-202601{day:02}T120000-0007.db" for day in range(4, 9)]
    assert (tmp_path / "store.db.lock").exists() is False
    prepare(url, backups, NOW)
    assert len(list(backups.iterdir())) == 5, "nothing to migrate, nothing to back up"
    # A backup can be restored. It is migrated at the next start.
    restore(backups / found[0], url, NOW)
    prepare(url, backups, NOW)
    assert num_events(file) == 0


def test_postgresql_is_backed_up_by_its_own_programs() -> None:
    url = "postgresql+psycopg://ada:secret@host/name"
    with pytest.raises(UserError, match="embedded database") as refused:
        embedded_file(url)
    assert "pg_dump" in (refused.value.hint or "")
    assert "secret" not in dump_hint(url)
    assert "postgresql://ada@host/name" in dump_hint(url)
