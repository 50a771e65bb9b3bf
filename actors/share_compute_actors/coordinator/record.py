"""The durable record of a job's steps: what it says is committed, whatever dies."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from share_compute.errors import StaleEpoch, Unavailable
from share_compute.jobs.events import StepCommitted
from share_compute.planning.plan import Plan
from share_compute.protocol.doubts import quarantines
from share_compute.protocol.roster import Roster, Worker
from share_compute.training.loss_scale import LossScale

FILE = "steps.sqlite3"
_SHAPE = 4
"""Of the tables; a file of another shape is begun anew, and its job continues from its checkpoint."""
_STEPS_KEPT = 10_000
"""More than who has to be told of them, or replays them, is ever behind."""
_TABLES = """
    CREATE TABLE standing (
        one INTEGER PRIMARY KEY CHECK (one = 1), attempt INTEGER NOT NULL, epoch INTEGER NOT NULL,
        committed INTEGER NOT NULL, crew TEXT
    );
    CREATE TABLE steps (
        step INTEGER PRIMARY KEY, scale REAL NOT NULL, facts TEXT, generation INTEGER NOT NULL DEFAULT 0
    );
    CREATE TABLE offences (
        number INTEGER PRIMARY KEY, worker TEXT NOT NULL, step INTEGER NOT NULL, what TEXT NOT NULL,
        quarantines INTEGER NOT NULL, accuser TEXT
    );
    CREATE TABLE validations (step INTEGER PRIMARY KEY, loss REAL NOT NULL);
    INSERT INTO standing VALUES (1, 0, 0, 0, NULL);
"""


class Standing(NamedTuple):
    """Where a job stands."""

    epoch: int
    """Last epoch that began."""
    committed: int
    """Last committed step."""
    scale: float
    """What the gradient of that step is multiplied by."""
    generation: int = 0
    """Times that the step was started over."""


@dataclass(frozen=True, slots=True)
class CrewFacts:
    """Who holds a job, and how: all that another coordinator needs to go on with the same members."""

    roster: Roster
    """Of the last epoch that was formed."""
    plan: Plan
    """As that epoch carries it out."""
    runs: tuple[int, ...]
    """Of the job's `SummationTree`."""
    attempt: int
    """That formed it."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What is told of a committed step, and where it leaves the loss scale."""

    event: StepCommitted
    loss_scale: LossScale
    """Of the next step."""
    is_skipped: bool = False
    """Whether it changed nothing, since its gradient is not finite."""


_crews: TypeAdapter[CrewFacts] = TypeAdapter(CrewFacts)
_steps: TypeAdapter[StepFacts] = TypeAdapter(StepFacts)


class StepRecord:
    """One job's record: a file in its folder.

    Of two coordinators of one job only the one of the later attempt may write: it claims the record, and whatever the
    other says afterwards is refused. Every write says for which epoch it speaks, too.

    Args:
        folder: the job's.
        attempt: for which it writes.

    Raises:
        Unavailable: the file cannot be written.
    """

    def __init__(self, folder: Path, attempt: int) -> None:
        self._path = folder / FILE
        self._attempt = attempt
        with self._translated():
            self._base = sqlite3.connect(
                self._path, isolation_level=None, check_same_thread=False, timeout=10.0
            )
            self._base.execute("PRAGMA journal_mode = WAL")
            self._base.execute("PRAGMA synchronous = FULL")  # a commit survives a power cut
            self._shape()

    def _shape(self) -> None:
        """Make the tables, in place of those of another version."""
        with self._transaction():
            if self._base.execute("PRAGMA user_version").fetchone() == (_SHAPE,):
                return
            tables = self._base.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
            ).fetchall()
            for (name,) in tables:
                self._base.execute(f'DROP TABLE "{name}"')
            for statement in filter(str.strip, _TABLES.split(";")):
                self._base.execute(statement)
            self._base.execute(f"PRAGMA user_version = {_SHAPE}")

    def claim(self) -> Standing:
        """Let this attempt write from now on, and no earlier one; it takes an epoch of its own.

        Raises:
            StaleEpoch: a later attempt has claimed the record.
        """
        claimed = self._write(
            "UPDATE standing SET attempt = ?, epoch = epoch + 1 WHERE attempt <= ?",
            self._attempt,
            self._attempt,
        )
        if claimed is None:
            raise superseded()
        return claimed

    # -- what happens ------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> Standing | None:
        """Write down that an epoch begins, and return where the job stands; None when it, or a later one, has begun."""
        return self._write(
            "UPDATE standing SET epoch = ? WHERE epoch < ? AND attempt = ?", epoch, epoch, self._attempt
        )

    def lay(self, crew: CrewFacts) -> None:
        """Write down who holds the job from now on.

        Raises:
            StaleEpoch: a later epoch has begun.
        """
        written = self._write(
            "UPDATE standing SET crew = ? WHERE epoch = ? AND attempt = ?",
            _crews.dump_json(crew).decode(),
            crew.roster.epoch,
            self._attempt,
        )
        if written is None:
            raise superseded()

    def commit(
        self, epoch: int, step: int, scale: float, facts: StepFacts | None = None, generation: int = 0
    ) -> Standing | None:
        """Write down that a step is committed, with what is told of it, and return where the job stands.

        None when a later epoch has begun, or another step was due.
        """
        with self._transaction():
            standing = self._write(
                "UPDATE standing SET committed = ? WHERE epoch = ? AND committed = ? AND attempt = ?",
                step, epoch, step - 1, self._attempt,
            )  # fmt: skip
            if standing is None:
                return None
            told = None if facts is None else _steps.dump_json(facts).decode()
            self._base.execute(
                "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?)", (step, scale, told, generation)
            )
            self._base.execute("DELETE FROM steps WHERE step <= ?", (step - _STEPS_KEPT,))
            return self.read()

    def validated(self, step: int, loss: float) -> None:
        """Write down what a validation gave: it decides when training stops."""
        with self._translated():
            self._base.execute("INSERT OR REPLACE INTO validations VALUES (?, ?)", (step, loss))

    def offend(
        self, worker: Worker, step: int, what: str, *, is_grave: bool, accuser: Worker | None = None
    ) -> bool:
        """Write down that a machine made wrong numbers; return whether the job does without it from now on.

        Args:
            worker: the machine.
            step: in which.
            what: it made, for people.
            is_grave: whether it is not given a second chance.
            accuser: the member on whose word alone it rests; None where the coordinator knows it.
        """
        with self._transaction():
            before = self._base.execute("SELECT accuser FROM offences WHERE worker = ?", (worker,))
            is_over = is_grave or quarantines(accuser, [one for (one,) in before])
            self._base.execute(
                "INSERT INTO offences (worker, step, what, quarantines, accuser) VALUES (?, ?, ?, ?, ?)",
                (worker, step, what, is_over, accuser),
            )
            return is_over

    def quarantined(self) -> frozenset[Worker]:
        """Return the machines that the job does without, since they made wrong numbers."""
        rows = self._base.execute("SELECT DISTINCT worker FROM offences WHERE quarantines")
        return frozenset(worker for (worker,) in rows)

    def rewind(self, step: int) -> None:
        """Go back to a checkpoint, after state that was committed later is lost with all who had it."""
        with self._transaction():
            rewound = self._write(
                "UPDATE standing SET epoch = epoch + 1, committed = ?, crew = NULL WHERE attempt = ?",
                step, self._attempt,
            )  # fmt: skip
            if rewound is None:
                raise superseded()
            self._base.execute("DELETE FROM steps WHERE step > ?", (step,))
            self._base.execute("DELETE FROM validations WHERE step > ?", (step,))

    # -- what is there -----------------------------------------------------------------------------------------------

    def read(self) -> Standing:
        """Return where the job stands."""
        found = self._base.execute(
            "SELECT epoch, committed, coalesce(scale, 1.0), coalesce(generation, 0) "
            "FROM standing LEFT JOIN steps ON step = committed"
        )
        return Standing(*found.fetchone())

    @property
    def crew(self) -> CrewFacts | None:
        """Who holds the job; None after it went back to a checkpoint, until its next epoch is formed."""
        (written,) = self._base.execute("SELECT crew FROM standing").fetchone()
        return None if written is None else _crews.validate_json(written)

    def steps(self, after: int) -> list[StepFacts]:
        """Return what is to be told of the committed steps that follow ``after``, in order."""
        query = "SELECT facts FROM steps WHERE step > ? AND facts IS NOT NULL ORDER BY step"
        return [_steps.validate_json(facts) for (facts,) in self._base.execute(query, (after,))]

    def scales(self) -> dict[int, float]:
        """Return what the gradient of each committed step was multiplied by."""
        return dict(self._base.execute("SELECT step, scale FROM steps ORDER BY step"))

    def validations(self) -> tuple[tuple[int, float], ...]:
        """Return step and loss of each validation."""
        return tuple(self._base.execute("SELECT step, loss FROM validations ORDER BY step"))

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    # -- the file ----------------------------------------------------------------------------------------------------

    def _write(self, statement: str, *values: float | str) -> Standing | None:
        with self._translated():
            return self.read() if self._base.execute(statement, values).rowcount == 1 else None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Write all of what is done inside, or nothing."""
        with self._translated():
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._base.execute("ROLLBACK")
                raise
            self._base.execute("COMMIT")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as failure:
            raise Unavailable(
                f"{self._path} cannot be written: {failure}",
                mend="make room on the server's disk, then resume the job",
            ) from failure


def superseded() -> StaleEpoch:
    """Return the error for a coordinator that another one has replaced."""
    return StaleEpoch(
        "another coordinator has taken over this job", mend="nothing: follow the job's other attempt"
    )
