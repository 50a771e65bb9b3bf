"""The durable record of a job's steps: what it says is committed, whatever dies."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import NamedTuple

from share_compute.errors import Unavailable

FILE = "steps.sqlite3"


class Standing(NamedTuple):
    """Where a job stands."""

    epoch: int
    """Last epoch that began."""
    committed: int
    """Last committed step."""
    scale: float
    """What the gradient of that step is multiplied by."""


class StepRecord:
    """One job's record: a file in its folder.

    Every write says for which epoch it speaks, and fails when a later one has begun: of two coordinators of one job
    only the younger one commits.

    Args:
        folder: the job's.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._base = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=10.0)
        self._base.execute("PRAGMA journal_mode = WAL")
        self._base.execute("PRAGMA synchronous = FULL")  # a commit survives a power cut
        self._base.execute(
            "CREATE TABLE IF NOT EXISTS standing (one INTEGER PRIMARY KEY CHECK (one = 1), "
            "epoch INTEGER NOT NULL, committed INTEGER NOT NULL, scale REAL NOT NULL)"
        )
        self._base.execute("INSERT OR IGNORE INTO standing VALUES (1, 0, 0, 1.0)")

    def read(self) -> Standing:
        """Return where the job stands."""
        return Standing(*self._base.execute("SELECT epoch, committed, scale FROM standing").fetchone())

    def begin_epoch(self, epoch: int) -> Standing | None:
        """Write down that an epoch begins, and return where the job stands; None when it, or a later one, has begun."""
        return self._write("UPDATE standing SET epoch = ? WHERE epoch < ?", epoch, epoch)

    def commit(self, epoch: int, step: int, scale: float) -> Standing | None:
        """Write down that a step is committed, and return where the job stands.

        None when a later epoch has begun, or another step was due.
        """
        return self._write(
            "UPDATE standing SET committed = ?, scale = ? WHERE epoch = ? AND committed = ?",
            step, scale, epoch, step - 1,
        )  # fmt: skip

    def rewind(self, step: int) -> None:
        """Go back to a checkpoint, after state that was committed later is lost with all who had it.

        It takes an epoch of its own, so that an earlier coordinator commits nothing afterwards.
        """
        self._write("UPDATE standing SET epoch = epoch + 1, committed = ?, scale = 1.0", step)

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    def _write(self, statement: str, *values: float) -> Standing | None:
        try:
            return self.read() if self._base.execute(statement, values).rowcount == 1 else None
        except sqlite3.Error as failure:
            raise Unavailable(
                f"{self._path} cannot be written: {failure}",
                mend="make room on the server's disk, then resume the job",
            ) from failure
