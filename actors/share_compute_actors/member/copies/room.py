"""Room for copies of other members' shards: where they lie, and how much of it they may take.

They lie on disk. A folder for temporary files may be memory all the same, as ``/tmp`` is on many systems; then what
lies there counts as memory that this member takes of what the machine's owner lends.
"""

from __future__ import annotations

import threading
from pathlib import Path

import psutil

from share_compute.errors import Unavailable
from share_compute.planning.words import bytes_text
from share_compute_actors.machine.temporary import is_memory, temporary_folder
from share_compute_actors.member.allocator import is_out_of_memory, peak_resident_bytes

_RESERVE_BYTES = 2**30
_RESERVE_SHARE = 0.05
"""The smaller of both is left free of a file system, for everybody else on it."""


class Room:
    """Counts what all copies of one member take, and refuses what there is no room for. Safe from any thread.

    Args:
        lent_bytes: memory that the machine's owner lends; 0 where that is not known.
        folder: where copies lie; `temporary_folder` if it is None.
    """

    def __init__(self, lent_bytes: int = 0, folder: Path | None = None) -> None:
        self.folder = folder or temporary_folder()
        self._lent_bytes = lent_bytes
        self._is_memory = is_memory(self.folder)
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Count so many bytes more, which are about to be written; none are always to be had.

        Raises:
            Unavailable: there is no room for them.
        """
        with self._lock:
            if size:
                self.require(size)
            self._taken += size

    def give_back(self, size: int) -> None:
        """Count so many bytes less: they were taken and are gone."""
        with self._lock:
            self._taken -= size

    def require(self, size: int) -> None:
        """See that there is room for so many bytes more.

        Raises:
            Unavailable: there is not.
        """
        left = self._left()
        if size <= left:
            return
        where, mend = str(self.folder), "free disk space there"
        if self._is_memory:
            where, mend = f"{where}, which is memory", "set TMPDIR there to a folder on a disk"
        raise Unavailable(
            f"it takes {bytes_text(size)} more in {where}, and {bytes_text(max(left, 0))} are left for that",
            mend=f"{mend}, or set parallelism.buddies to false",
        )

    def _left(self) -> int:
        try:
            disk = psutil.disk_usage(str(self.folder))
        except OSError as failure:
            raise Unavailable(
                f"{self.folder} is not there: {failure.strerror}",
                mend="make that folder again, or set parallelism.buddies to false",
            ) from failure
        left = disk.free - reserve_bytes(disk.total)
        if not self._is_memory:
            return left
        memory = psutil.virtual_memory().available
        if self._lent_bytes:
            # What training took at most it takes again in the next step.
            memory = min(memory, self._lent_bytes - peak_resident_bytes() - self._taken)
        return min(left, memory) if disk.total else memory  # some know no size of their own


def is_lack_of_room(failure: Exception) -> bool:
    """Whether there was no room for a copy, on the disk or in memory."""
    return isinstance(failure, Unavailable) or is_out_of_memory(failure)


def reserve_bytes(total_bytes: int) -> int:
    """Return how much of a file system of this size copies leave free."""
    return min(_RESERVE_BYTES, int(_RESERVE_SHARE * total_bytes))
