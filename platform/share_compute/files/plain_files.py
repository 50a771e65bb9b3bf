"""Access to files by paths from users, without following symbolic links."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

_ON_THE_WAY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def open_unlinked(path: Path) -> BufferedReader:
    """Open a regular file for reading; no component of its path may be a symbolic link.

    Each folder is opened relative to its parent, as openat2(2) does with RESOLVE_NO_SYMLINKS. So no link can be
    inserted between a check and its use.

    Args:
        path: absolute, or relative to the working folder.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or a part of its path is a link.
    """
    with opened_parent(path) as folder:
        # The file is opened non-blocking, because opening a pipe would wait for its other end.
        file = _opened(path.name, _FILE, folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return os.fdopen(file, "rb")


def remove_unlinked(path: Path) -> None:
    """Remove a file, a link, or a folder with its contents, without following links.

    Args:
        path: absolute, or relative to the working folder; no folder above it may be a link.

    Raises:
        OSError: the path does not exist, cannot be removed, or a folder above it is a link.
    """
    with opened_parent(path) as folder:
        if stat.S_ISDIR(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(path.name, dir_fd=folder)
        else:
            os.unlink(path.name, dir_fd=folder)


@contextmanager
def opened_parent(path: Path) -> Iterator[int]:
    """Yield a file descriptor of the folder that contains a path, opened without following links.

    Raises:
        OSError: a folder above the path cannot be opened, or is a link.
    """
    folder = os.open("/", _ON_THE_WAY)
    try:
        for part in path.absolute().parts[1:-1]:
            inner = _opened(part, _ON_THE_WAY, folder)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


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
