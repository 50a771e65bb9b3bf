"""Where a node keeps temporary files: on a disk if there is one, since in memory they take what is lent."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import psutil

_LASTING = Path("/var/tmp")  # noqa: S108 - the system's other folder for temporary files, which outlives its memory
_NAMED_BY = ("TMPDIR", "TEMP", "TMP")
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})


def temporary_folder() -> Path:
    """Return the folder for temporary files, one on a disk if there is any and the owner named no other."""
    usual = Path(tempfile.gettempdir())
    if any(os.environ.get(name) for name in _NAMED_BY) or not is_memory(usual):
        return usual
    return _LASTING if os.access(_LASTING, os.W_OK | os.X_OK) and not is_memory(_LASTING) else usual


def is_memory(folder: Path) -> bool:
    """Return whether files in a folder take memory, not room on a disk. Only Linux has such folders."""
    if sys.platform != "linux":
        return False
    place = folder.resolve()
    over = [mount for mount in psutil.disk_partitions(all=True) if place.is_relative_to(mount.mountpoint)]
    # Of mounts over the same folder, the last one counts.
    _, _, kind = max((len(mount.mountpoint), order, mount.fstype) for order, mount in enumerate(over))
    return kind in _IN_MEMORY
