"""Selects a node's folders: for temporary files, and for compiled code that later nodes of this machine reuse.

Temporary files are on a disk if possible, because files on a tmpfs use lent memory.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import psutil
from platformdirs import user_cache_path

from share_compute.errors import Unavailable

COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""Variable of torch with the folder of compiled code; the agent sets it for the processes of a node."""
_LASTING = Path("/var/tmp")  # noqa: S108 - the system's folder for temporary files that survive a reboot
_NAMED_BY = ("TMPDIR", "TEMP", "TMP")
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})


def temporary_folder() -> Path:
    """Return the folder for temporary files that ``TMPDIR``, ``TEMP`` or ``TMP`` names, else the system's default.

    Without these variables, return ``/var/tmp`` if the default is in memory and ``/var/tmp`` is not.
    """
    usual = Path(tempfile.gettempdir())
    if any(os.environ.get(name) for name in _NAMED_BY) or not is_memory(usual):
        return usual
    return _LASTING if os.access(_LASTING, os.W_OK | os.X_OK) and not is_memory(_LASTING) else usual


def private_folder(folder: Path) -> Path:
    """Return ``folder``; if it does not exist, make it, accessible only to this user.

    Raises:
        Unavailable: the folder belongs to another user, is a link, or cannot be made.
    """
    hint = "set TMPDIR to a folder of your own"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as failure:
        raise Unavailable(f"{folder} cannot be made: {failure.strerror}", hint=hint) from failure
    if found.st_uid != os.getuid() or folder.is_symlink():
        raise Unavailable(f"{folder} belongs to another user, or is a link", hint=hint)
    return folder


def compiled_folder() -> Path:
    """Return the folder of this user's compiled code, and make it if it does not exist.

    Raises:
        Unavailable: the folder belongs to another user, is a link, or cannot be made.
    """
    parent = user_cache_path("share-compute")
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise Unavailable(
            f"{parent} cannot be made: {failure.strerror}", hint="make it yourself"
        ) from failure
    return private_folder(parent / "compiled")


def is_memory(folder: Path) -> bool:
    """Return whether files in a folder use memory instead of disk space; always false on systems other than Linux."""
    if sys.platform != "linux":
        return False
    place = folder.resolve()
    over = [mount for mount in psutil.disk_partitions(all=True) if place.is_relative_to(mount.mountpoint)]
    # If several file systems are mounted at one folder, the last one counts.
    _, _, kind = max((len(mount.mountpoint), order, mount.fstype) for order, mount in enumerate(over))
    return kind in _IN_MEMORY
