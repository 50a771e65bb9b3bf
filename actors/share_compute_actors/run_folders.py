"""Folders of running processes under the temporary folder: short, private, swept when their owner died.

Ray keeps sockets below them, and a socket's path is limited to 107 bytes on Linux.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from share_compute.errors import Conflict, Unavailable
from share_compute_actors.processes import Identity, Roster

_LONGEST_ROOT = 40
_OWNER = "owner.json"
_OPENING_S = 30.0
"""A folder without an owner that is younger than this is being opened."""


def root_folder() -> Path:
    """Return the folder that holds all run folders of this user.

    Raises:
        Unavailable: somebody else owns it.
    """
    temporary = Path(tempfile.gettempdir())
    base = temporary if len(str(temporary)) <= _LONGEST_ROOT - 22 else Path("/tmp")  # noqa: S108  # sockets
    root = base / f"share-compute-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    status = root.lstat()
    if status.st_uid != os.getuid() or root.is_symlink():
        raise Unavailable(
            f"{root} belongs to somebody else", mend="set TMPDIR to a folder of your own, with a short path"
        )
    return root


def open_run_folder(key: str) -> Roster:
    """Return the roster of the run folder for ``key``; ends what a killed run of the same key left there.

    Raises:
        Conflict: a process that still runs uses it.
    """
    folder = root_folder() / hashlib.sha256(key.encode()).hexdigest()[:8]
    owner = _owner(folder)
    if owner is not None and owner.pid != os.getpid():
        raise Conflict(
            f"process {owner.pid} uses {folder} already",
            mend=f"end process {owner.pid}, or choose another name",
        )
    roster = Roster(folder)
    roster.end_leftovers()
    me = Identity.of(psutil.Process())
    (folder / _OWNER).write_text(json.dumps({"pid": me.pid, "started_at": me.started_at}))
    return roster


def abandoned() -> Iterator[Roster]:
    """Give the rosters of run folders whose owner died."""
    for folder in sorted(root_folder().iterdir()):
        if folder.is_dir() and _owner(folder) is None and not _is_being_opened(folder):
            yield Roster(folder)


def sweep() -> int:
    """End what killed runs of this user left, and remove their folders; returns how many there were."""
    count = 0
    for roster in abandoned():
        close_run_folder(roster)
        count += 1
    return count


def close_run_folder(roster: Roster) -> None:
    """End all that still runs there and remove the folder."""
    roster.stop_all()
    roster.end_leftovers()
    shutil.rmtree(roster.folder, ignore_errors=True)


def _is_being_opened(folder: Path) -> bool:
    return not (folder / _OWNER).exists() and time.time() - folder.stat().st_mtime < _OPENING_S


def _owner(folder: Path) -> psutil.Process | None:
    try:
        found = json.loads((folder / _OWNER).read_text())
        return Identity(int(found["pid"]), float(found["started_at"])).find()
    except (FileNotFoundError, ValueError, KeyError):
        return None
