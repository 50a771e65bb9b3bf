"""Disk space for backup copies: the folder of the copies, and the limit of their total size.

The folder may be in memory, as ``/tmp`` is on many systems. If so, copies use memory that the machine's owner lends.
"""

from __future__ import annotations

import threading
from pathlib import Path

import psutil

from share_compute.errors import Unavailable
from share_compute.quantities import bytes_text
from share_compute_actors.group.allocator import is_out_of_memory, peak_resident_bytes
from share_compute_actors.machine.temporary import is_memory, temporary_folder

_RESERVE_BYTES = 2**30
_RESERVE_SHARE = 0.05
"""Fraction of the file system's size that copies must leave free, up to `_RESERVE_BYTES`."""


class CopyQuota:
    """Counts the bytes of all copies of one member, and enforces their limit. All methods are thread-safe.

    Args:
        lent_bytes: main memory that the machine's owner lends, in bytes; 0 if unknown.
        folder: folder of the copies; None for `temporary_folder`.
    """

    def __init__(self, lent_bytes: int = 0, folder: Path | None = None) -> None:
        self.folder = folder or temporary_folder()
        self._lent_bytes = lent_bytes
        self._is_memory = is_memory(self.folder)
        self.taken_bytes = 0
        """Number of bytes that all copies take."""
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Reserve this many bytes before they are written; reserving 0 bytes always succeeds.

        Raises:
            Unavailable: there is not enough space, or the folder does not exist.
        """
        with self._lock:
            if size:
                self.require(size)
            self.taken_bytes += size

    def give_back(self, size: int) -> None:
        """Release this many bytes after their data was deleted."""
        with self._lock:
            self.taken_bytes -= size

    def require(self, size: int) -> None:
        """Check that there is space for this many more bytes.

        Raises:
            Unavailable: there is not enough space, or the folder does not exist.
        """
        left = self.left_bytes()
        if size <= left:
            return
        where, hint = str(self.folder), "free disk space there"
        if self._is_memory:
            where, hint = f"{where}, which is memory", "set TMPDIR there to a folder on a disk"
        raise Unavailable(
            f"it takes {bytes_text(size)} more in {where}, and {bytes_text(max(left, 0))} are left for that",
            hint=f"{hint}, or set parallelism.backups to false",
        )

    def left_bytes(self) -> int:
        """Return how many more bytes copies may take; negative if less than the reserve is free.

        Raises:
            Unavailable: the folder does not exist.
        """
        try:
            disk = psutil.disk_usage(str(self.folder))
        except OSError as failure:
            raise Unavailable(
                f"{self.folder} cannot be used: {failure.strerror}",
                hint="create that folder again, or set parallelism.backups to false",
            ) from failure
        left = disk.free - reserve_bytes(disk.total)
        if not self._is_memory:
            return left
        memory = psutil.virtual_memory().available
        if self._lent_bytes:
            # Reserve this process's peak memory, because the next step may need as much again.
            memory = min(memory, self._lent_bytes - peak_resident_bytes() - self.taken_bytes)
        return min(left, memory) if disk.total else memory  # some file systems report no size


def is_out_of_space(failure: Exception) -> bool:
    """Return whether an exception means that a copy lacks memory or disk space, or cannot be written."""
    return isinstance(failure, Unavailable) or is_out_of_memory(failure)


def reserve_bytes(total_bytes: int) -> int:
    """Return the free space, in bytes, that backup copies must leave on a file system of ``total_bytes``."""
    return min(_RESERVE_BYTES, int(_RESERVE_SHARE * total_bytes))
