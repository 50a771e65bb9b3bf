"""Backups of the embedded SQLite database: made while it is in use, checked, and restored."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from sqlalchemy import make_url

from share_compute.errors import Conflict, NotFound, Unavailable, UserError
from share_compute.files.durable import sync
from share_compute.store.database.database import (
    migration_config,
    newest_revision,
    open_engine,
    revision,
    upgrade,
)
from share_compute.store.database.holding import take_lock

FOLDER = "backups"
"""Name of the folder of backups, inside the data folder."""
_KEPT = 5
"""Number of newest pre-migration backups to keep; older ones are deleted."""
_BESIDE = ("", "-wal", "-shm")
"""Suffixes of the files of an SQLite database: the database itself, its write-ahead log, its shared memory."""
_PAGES_AT_ONCE = 4096
_HEADER = b"SQLite format 3\0"
"""First bytes of each SQLite file (https://www.sqlite.org/fileformat.html, section 1.3)."""
_log = logging.getLogger(__name__)


def embedded_file(url: str) -> Path:
    """Return the file of an SQLite database.

    Raises:
        UserError: the database is not an SQLite file; the error says how to back it up.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database and parsed.database != ":memory:":
        return Path(parsed.database)
    raise UserError("only the embedded database (SQLite) is backed up by share-compute", hint=dump_hint(url))


def dump_hint(url: str) -> str:
    """Return the commands that back up and restore a PostgreSQL database."""
    shown = make_url(url)._replace(drivername="postgresql", password=None).render_as_string()
    return f"pg_dump --format=custom --file=share-compute.dump '{shown}'; put it back with pg_restore --clean"


def prepare(url: str, backups: Path, now: datetime) -> None:
    """Migrate a database to the newest schema.

    An SQLite file is checked for damage first, and backed up if it needs a migration. The caller must hold the lock of
    the database.

    Args:
        url: URL of the database.
        backups: folder of the backups.
        now: current time.

    Raises:
        Conflict: a newer version made the schema.
        Unavailable: the database does not answer or is damaged, or the backup cannot be written.
    """
    is_embedded = make_url(url).get_backend_name() == "sqlite"
    if is_embedded and embedded_file(url).exists():
        require_sound(embedded_file(url), backups)
    current = revision(url)
    if current == newest_revision():
        return
    if current in _known_revisions():
        if is_embedded:
            target = backups / f"before-migration-{now:%Y%m%dT%H%M%S}-{current}.db"
            back_up(embedded_file(url), target)
            _log.warning("the database is migrated from revision %s; a backup is %s", current, target)
            _keep_newest(backups)
        else:
            _log.warning(
                "the database is migrated from revision %s; back it up with %s", current, dump_hint(url)
            )
    upgrade(url)


def _known_revisions() -> list[str]:
    """Return the Alembic revisions of the migrations in this package, newest first."""
    from alembic.script import ScriptDirectory  # noqa: PLC0415 - slow

    scripts = ScriptDirectory.from_config(migration_config())
    return [script.revision for script in scripts.walk_revisions()]


def _revision_of(file: Path) -> str | None:
    """Return the Alembic revision of an SQLite file's schema; None if no revision is recorded."""
    with closing(sqlite3.connect(file, timeout=10.0)) as connection:
        try:
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        except sqlite3.OperationalError:  # the table does not exist
            return None
    return None if row is None else str(row[0])


def require_sound(file: Path, backups: Path | None = None) -> None:
    """Raise Unavailable, with a hint, if an SQLite database is damaged or cannot be read.

    Args:
        file: file of the database.
        backups: folder of backups; the hint names the newest one in it.
    """
    try:
        with closing(sqlite3.connect(file, timeout=10.0)) as connection:
            found = [str(row[0]) for row in connection.execute("PRAGMA quick_check(1)")]
    except sqlite3.OperationalError as failure:
        raise Unavailable(
            f"{file} cannot be read: {failure}", hint="see to its rights, and to its disk"
        ) from failure
    except sqlite3.DatabaseError as failure:
        found = [str(failure)]
    if found != ["ok"]:
        newest = _newest(backups) if backups is not None else None
        known = str(newest) if newest is not None else "FILE"
        raise Unavailable(
            f"the database {file} is damaged: {found[0] if found else 'it says nothing'}",
            hint=f"put a backup back: share-compute restore {known}; the damaged one is kept beside it",
            details={"database": str(file), "backup": None if newest is None else str(newest)},
        )


def back_up(file: Path, target: Path) -> int:
    """Copy an SQLite database, which may be in use, atomically to a new file; return the size of the copy in bytes.

    Raises:
        NotFound: the database does not exist.
        Conflict: the target exists.
        Unavailable: the target cannot be written, or the database cannot be read.
    """
    if not file.is_file():
        raise NotFound(f"there is no database {file}", hint="name its server's folder with --data-folder")
    if target.exists():
        raise Conflict(f"{target} exists already", hint="choose another name")
    with _whole(target) as partial:
        _copy(file, partial)
    return target.stat().st_size


def require_backup(source: Path) -> None:
    """Check that a file is a backup that this version can restore; the errors are those of `restore`."""
    if not source.is_file():
        raise NotFound(
            f"there is no backup {source}", hint=f"look into the folder {FOLDER} of the data folder"
        )
    if not _is_sqlite(source):
        raise _no_backup(source)
    require_sound(source)
    found = _revision_of(source)
    if found is None:
        raise _no_backup(source)
    if found not in _known_revisions():
        raise Conflict(
            f"{source} is of revision {found}, which this version cannot read",
            hint="choose another backup, or install the version that made it",
        )


def restore(source: Path, url: str, now: datetime) -> Path | None:
    """Replace the embedded database by a backup.

    Args:
        source: file of the backup.
        url: URL of the database.
        now: current time.

    Returns:
        The path to which the previous database was moved; None if there was none.

    Raises:
        UserError: the URL does not name an SQLite file, or the file is not a backup of share-compute.
        NotFound: the backup does not exist.
        Conflict: a server uses the database, or this version cannot read the backup.
        Unavailable: the backup is damaged, or a file cannot be written.
    """
    file = embedded_file(url)
    require_backup(source)
    engine = open_engine(url)
    with _whole(file.with_name(f".{file.name}.restored")) as partial:
        _copy(source, partial)
    restored = file.with_name(f".{file.name}.restored")
    try:
        with closing(take_lock(engine)):
            replaced = _rename_replaced(file, now)
            restored.replace(file)
            sync(file.parent)
    finally:
        engine.dispose()
        restored.unlink(missing_ok=True)
    return replaced


def _is_sqlite(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(len(_HEADER)) == _HEADER
    except OSError as failure:
        raise Unavailable(
            f"{file} cannot be read: {failure.strerror}", hint="see to its rights, and to its disk"
        ) from failure


def _no_backup(file: Path) -> UserError:
    return UserError(
        f"{file} is no backup of share-compute",
        hint=f"share-compute backup makes one, by default in the folder {FOLDER} of the data folder",
    )


def _rename_replaced(file: Path, now: datetime) -> Path | None:
    """Rename a database and its log files; return its new path, or None if there was no database."""
    if not file.exists():
        return None
    renamed = file.with_name(f"{file.name}.replaced-{now:%Y%m%dT%H%M%S}")
    # Log files first: a crash in between leaves a database without its log, which is an older but usable state.
    for suffix in reversed(_BESIDE):
        with suppress(FileNotFoundError):
            file.with_name(file.name + suffix).replace(renamed.with_name(renamed.name + suffix))
    return renamed


def _copy(file: Path, target: Path) -> None:
    try:
        # Opening the source read-only would require an existing log (SQLite, "WAL-mode databases on read-only media").
        with closing(sqlite3.connect(file, timeout=10.0)) as source, closing(sqlite3.connect(target)) as copy:
            source.backup(copy, pages=_PAGES_AT_ONCE)
            copy.execute("PRAGMA journal_mode=DELETE")  # makes the copy a single file, without a log file
    except sqlite3.Error as failure:
        raise Unavailable(
            f"{file} cannot be copied to {target}: {failure}", hint="see that its disk is not full"
        ) from failure


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """Yield a temporary file, readable only by its owner, that replaces the target if the block succeeds."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial.unlink(missing_ok=True)
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        yield partial
        sync(partial)
        partial.replace(target)
        sync(target.parent)
    except OSError as failure:
        raise Unavailable(
            f"{target} cannot be written: {failure.strerror}", hint="choose another folder, or free space"
        ) from failure
    finally:
        partial.unlink(missing_ok=True)


def _newest(backups: Path) -> Path | None:
    return max(backups.glob("*.db"), key=lambda file: file.stat().st_mtime, default=None)


def _keep_newest(backups: Path) -> None:
    found = sorted(backups.glob("before-migration-*.db"))
    for file in found[:-_KEPT]:
        file.unlink(missing_ok=True)
