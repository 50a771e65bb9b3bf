"""Receives one file of an upload at a temporary path, and moves the complete file to its final path."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from share_compute.errors import Unavailable, UserError
from share_compute_api.schemas.bodies import UploadFile


class Arrival:
    """A file that is being received. Call `close` at the end, also after an error.

    Args:
        partial: path of the file until it is complete.
        path: final path of the file in its upload.
        reserve: reserves further bytes of the upload space; raises TooLarge if they do not fit, and Conflict or
            NotFound if the upload no longer accepts files.
        settle: moves the complete file to its final path; raises an error if the upload no longer accepts files.
        release: returns the reserved bytes if the file did not arrive.
    """

    def __init__(
        self,
        partial: Path,
        path: str,
        reserve: Callable[[int], None],
        settle: Callable[[Path, UploadFile], None],
        release: Callable[[int], None],
    ) -> None:
        self._partial = partial
        self._path = path
        self._reserve = reserve
        self._settle = settle
        self._release = release
        self._hash = hashlib.sha256()
        self._size_bytes = 0
        self._is_settled = False
        with _translated(path):
            self._file = partial.open("xb", buffering=0)

    def write(self, piece: bytes) -> None:
        """Write the next bytes of the file.

        Raises:
            TooLarge: there is no space for the bytes.
            Conflict, NotFound: the upload no longer accepts files.
            Unavailable: the bytes cannot be written to the disk.
        """
        self._reserve(len(piece))
        self._size_bytes += len(piece)
        self._hash.update(piece)
        left = memoryview(piece)
        with _translated(self._path):
            while left:
                left = left[self._file.write(left) :]

    def finish(self, sha256: str | None = None) -> UploadFile:
        """Move the file to its final path; return its size and checksum.

        Args:
            sha256: SHA-256 checksum from the sender, in hexadecimal.

        Raises:
            UserError: the checksum differs, or the path is both a file and a folder of the upload.
            Conflict, NotFound: the upload no longer accepts files.
            Unavailable: the file cannot be written.
        """
        found = self._hash.hexdigest()
        if sha256 is not None and sha256 != found:
            raise UserError(
                f"{self._path} arrived damaged: its SHA-256 is {found}, not {sha256}", hint="send it again"
            )
        file = UploadFile(path=self._path, size_bytes=self._size_bytes, sha256=found)
        with _translated(self._path):
            os.fsync(self._file.fileno())
            self._file.close()
            self._settle(self._partial, file)
        self._is_settled = True
        return file

    def close(self) -> None:
        """Delete the partial file and release its reserved bytes; do nothing after a successful `finish`."""
        if self._is_settled:
            return
        self._file.close()
        self._partial.unlink(missing_ok=True)
        self._release(self._size_bytes)


@contextmanager
def _translated(path: str) -> Iterator[None]:
    try:
        yield
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as failure:
        raise UserError(
            f"{path} cannot be both a file and a folder of the upload", hint="rename one of the two"
        ) from failure
    except OSError as failure:
        is_full = failure.errno in (errno.ENOSPC, errno.EDQUOT)
        raise Unavailable(
            f"the server cannot keep {path}: {failure.strerror or failure}",
            hint="remove uploads that nobody needs: share-compute uploads list"
            if is_full
            else "see the rights of the server's data folder",
        ) from failure
