"""Files that strangers named, opened so that a link cannot take the place of what was checked before."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

_ON_THE_WAY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def open_unlinked(path: Path) -> BufferedReader:
    """Open a regular file for reading; no component of its path may be a link.

    A path is checked when a job is submitted, and read much later. Each folder is opened in the one before it, as
    openat2(2) does with RESOLVE_NO_SYMLINKS, so there is no moment at which a link could be put in.

    Args:
        path: without ``..``; a relative one begins at the working folder.

    Raises:
        OSError: the file cannot be opened, is not a regular one, or a part of its path is a link.
    """
    *folders, name = path.absolute().parts[1:]
    folder = os.open("/", _ON_THE_WAY)
    try:
        for part in folders:
            inner = _opened(part, _ON_THE_WAY, folder)
            os.close(folder)
            folder = inner
        # Not blocking: to open a pipe would wait for its other end.
        file = _opened(name, _FILE, folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return os.fdopen(file, "rb")


def _opened(name: str, flags: int, folder: int) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as failure:
        is_link = failure.errno in (errno.ELOOP, errno.ENOTDIR) and stat.S_ISLNK(
            os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        )
        if is_link:
            raise OSError(
                errno.ELOOP, f"{name!r} in its path is a link; the job named where it led"
            ) from failure
        raise
