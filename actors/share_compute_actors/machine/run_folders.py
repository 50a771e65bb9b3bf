"""Makes private folders with short paths for running processes, and removes folders whose owner died.

Ray keeps Unix sockets in these folders, and Linux limits the path of a socket to 107 bytes. The process that uses a
folder locks a file in the folder. The system releases the lock when the process ends, for any reason.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from share_compute.errors import Conflict, Unavailable
from share_compute_actors.machine.processes import ChildProcesses

_LONGEST_ROOT = 27
"""Longest path of the root folder, in bytes.

The rest of a socket's path takes up to 80 bytes:
``/XXXXXXXX/ray/session_<date>_<time>_<pid>/sockets/plasma_store.1``."""
_LOCK = "lock"
_SWEEPING_S = 10.0
"""Longest wait in seconds for another process that holds the lock to remove the folder."""
_POLL_S = 0.05


def root_folder() -> Path:
    """Return the folder that holds all run folders of this user.

    Raises:
        Unavailable: the folder belongs to another user, is a link, or cannot be made.
    """
    temporary = Path(tempfile.gettempdir())
    name = f"sc-{os.getuid()}"
    fits = len(os.fsencode(temporary / name)) <= _LONGEST_ROOT
    root = (temporary if fits else Path("/tmp")) / name  # noqa: S108 - sockets need a short path
    hint = "set TMPDIR to a folder of your own, with a short path"
    try:
        root.mkdir(mode=0o700, exist_ok=True)
    except OSError as failure:
        raise Unavailable(f"{root} cannot be made: {failure.strerror}", hint=hint) from failure
    if root.lstat().st_uid != os.getuid() or root.is_symlink():
        raise Unavailable(f"{root} belongs to another user, or is a link", hint=hint)
    return root


def run_folder(key: str) -> Path:
    """Return the path of the run folder for ``key``; the folder need not exist."""
    return root_folder() / hashlib.sha256(key.encode()).hexdigest()[:8]


def open_run_folder(key: str) -> ChildProcesses:
    """Lock the run folder for ``key``, and return an object that starts child processes in it.

    Processes that a killed run with the same key left behind are ended first.

    Raises:
        Conflict: a running process uses the folder.
        Unavailable: the folder cannot be written.
    """
    folder = run_folder(key)
    with _translated(folder):
        lock = _take(folder)
        children = ChildProcesses(folder, lock)
        children.end_leftovers()
        lock.write(str(os.getpid()))
        lock.flush()
    return children


def abandoned() -> Iterator[ChildProcesses]:
    """Lock each run folder whose owner died, and yield its `ChildProcesses`; unlock it before locking the next.

    Raises:
        Unavailable: a folder cannot be written.
    """
    for folder in sorted(root_folder().iterdir()):
        with _translated(folder):
            lock = _try_to_take(folder)
        if lock is not None:
            with lock:
                yield ChildProcesses(folder, lock)


def sweep() -> int:
    """Close each run folder of this user whose owner died (see `close_run_folder`); return the number of folders."""
    count = 0
    for children in abandoned():
        close_run_folder(children)
        count += 1
    return count


def close_run_folder(children: ChildProcesses) -> None:
    """End all processes of a run folder, remove the folder and release its lock."""
    children.stop_all()
    children.end_leftovers()
    doomed = children.folder
    # The folder is renamed first, so that the next owner can use its name while files are removed.
    with suppress(OSError):
        doomed = doomed.rename(doomed.with_suffix(f".{secrets.token_hex(4)}"))
    shutil.rmtree(doomed, ignore_errors=True)
    if children.lock is not None:
        children.lock.close()


def _take(folder: Path) -> TextIO:
    deadline = time.monotonic() + _SWEEPING_S
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = _try_to_take(folder)
        if lock is not None:
            return lock
        owner = _owner(folder)
        if owner or time.monotonic() > deadline:
            raise Conflict(
                f"process {owner or 'unknown'} uses {folder} already",
                hint=f"end process {owner}, or choose another name" if owner else "try again in a minute",
            )
        time.sleep(_POLL_S)


def _try_to_take(folder: Path) -> TextIO | None:
    """Lock a folder and return its lock file, open and empty; None if the folder is locked or being removed."""
    file = folder / _LOCK
    try:
        lock = file.open("a", encoding="ascii")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if file.stat().st_ino == os.fstat(lock.fileno()).st_ino:
            lock.truncate(0)  # the pid in it belongs to a dead owner
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass  # locked by another process, or removed since it was opened
    except BaseException:
        lock.close()
        raise
    lock.close()
    return None


@contextmanager
def _translated(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        raise Unavailable(
            f"{folder} cannot be written: {failure.strerror}",
            hint="free some disk space, or set TMPDIR to a folder of your own, with a short path",
        ) from failure


def _owner(folder: Path) -> str:
    try:
        return (folder / _LOCK).read_text(encoding="ascii")
    except FileNotFoundError:
        return ""
