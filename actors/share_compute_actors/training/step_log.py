"""The step log of a job: a SQLite file with its epochs, committed steps, merges, offences and validation losses."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from share_compute.errors import StaleEpoch, Unavailable
from share_compute.lifecycle.attempt_events import StepCommitted
from share_compute.planning.plan import Plan
from share_compute.protocol.doubts import quarantines
from share_compute.protocol.membership import Membership, Worker
from share_compute.specification.boundaries import NO_BOUNDARY_COMPRESSION, BoundaryCompressionSpec
from share_compute.synchronization.records import MergeRecord
from share_compute.training.loss_scale import LossScale
from share_compute.training.metrics import Figures
from share_compute_actors.messages import Updates

FILE = "steps.sqlite3"
_SHAPE = 10
"""Version of the tables. Tables of another version are dropped."""
STEPS_KEPT = 10_000
"""Number of the latest committed steps that the log keeps."""
_TABLES = """
    CREATE TABLE standing (
        one INTEGER PRIMARY KEY CHECK (one = 1), attempt INTEGER NOT NULL, epoch INTEGER NOT NULL,
        committed INTEGER NOT NULL, membership TEXT, is_compiled INTEGER
    );
    CREATE TABLE steps (
        step INTEGER PRIMARY KEY, scale REAL NOT NULL, facts TEXT, generation INTEGER NOT NULL DEFAULT 0,
        rate REAL
    );
    CREATE TABLE offences (
        number INTEGER PRIMARY KEY, worker TEXT NOT NULL, step INTEGER NOT NULL, what TEXT NOT NULL,
        quarantines INTEGER NOT NULL, accuser TEXT
    );
    CREATE TABLE validations (step INTEGER PRIMARY KEY, figures TEXT NOT NULL);
    CREATE TABLE branch_merges (step INTEGER PRIMARY KEY, base INTEGER NOT NULL, is_over INTEGER NOT NULL DEFAULT 0);
    CREATE TABLE merges (version INTEGER PRIMARY KEY, record TEXT NOT NULL);
    INSERT INTO standing VALUES (1, 0, 0, 0, NULL, NULL);
"""


class Standing(NamedTuple):
    """The position of a job: its last epoch and its last committed step."""

    epoch: int
    """Last epoch that began."""
    committed: int
    """Last committed step."""
    scale: float
    """Factor by which the gradient of the last committed step was multiplied; 1.0 if the log lacks the step."""
    generation: int = 0
    """Number of restarts of the last committed step because of doubtful numbers; 0 if the log lacks the step."""
    rate: float | None = None
    """`StepFacts.rate` of the last committed step."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """Facts about a job's members, with which another coordinator can continue with the same members."""

    membership: Membership
    """Membership of the last epoch that was planned; its members may not have begun it."""
    plan: Plan
    """Plan that the members of this epoch carry out."""
    runs: tuple[int, ...]
    """`SummationTree.runs` of the job: number of consecutive microbatch ids in each run."""
    attempt: int
    """Number of the attempt that planned the epoch."""
    boundaries: BoundaryCompressionSpec = NO_BOUNDARY_COMPRESSION
    """Compression at the boundaries between stages, as the job's first plan fixed it."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Facts about a committed step: its event, and the loss scale after it."""

    event: StepCommitted
    loss_scale: LossScale
    """Loss scale of the next step."""
    is_skipped: bool = False
    """Whether the step changed no weights, because its float16 gradient is not finite."""
    rate: float | None = None
    """Learning rate of the step, if it depends on validations; None if it follows from the step alone."""


_groups: TypeAdapter[GroupFacts] = TypeAdapter(GroupFacts)
_steps: TypeAdapter[StepFacts] = TypeAdapter(StepFacts)
_merges: TypeAdapter[MergeRecord] = TypeAdapter(MergeRecord)


class StepLog:
    """The step log of one job: a SQLite file in the job's folder.

    Each attempt calls `claim` before it writes. A claim makes later writes of earlier attempts fail.

    Args:
        folder: folder of the job.
        attempt: number of the attempt that writes.

    Raises:
        Unavailable: the file cannot be used. All methods except `close` may raise this error, too.
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
        """Create the tables, and drop tables of another version."""
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
        """Block writes of earlier attempts, begin a new epoch, and return the job's position.

        Raises:
            StaleEpoch: a later attempt has claimed the step log.
        """
        claimed = self._write(
            "UPDATE standing SET attempt = ?, epoch = epoch + 1 WHERE attempt <= ?",
            self._attempt,
            self._attempt,
        )
        if claimed is None:
            raise superseded()
        return claimed

    @property
    def is_claimed(self) -> bool:
        """Whether no later attempt has claimed the step log."""
        ((attempt,),) = self._rows("SELECT attempt FROM standing")
        return int(attempt) <= self._attempt

    def _require_claimed(self) -> None:
        if not self.is_claimed:
            raise superseded()

    # -- writing -----------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> Standing | None:
        """Write that an epoch begins, and return the job's position.

        Return None if this or a later epoch has begun, or if a later attempt has claimed the step log.
        """
        return self._write(
            "UPDATE standing SET epoch = ? WHERE epoch < ? AND attempt = ?", epoch, epoch, self._attempt
        )

    def lay(self, group: GroupFacts) -> None:
        """Write facts about the members that will train the job.

        Raises:
            StaleEpoch: the membership's epoch is not the latest epoch, or a later attempt has claimed the log.
        """
        written = self._write(
            "UPDATE standing SET membership = ? WHERE epoch = ? AND attempt = ?",
            _groups.dump_json(group).decode(),
            group.membership.epoch,
            self._attempt,
        )
        if written is None:
            raise superseded()

    def commit(
        self, epoch: int, step: int, scale: float, facts: StepFacts | None = None, generation: int = 0
    ) -> Standing | None:
        """Write that a step is committed, with its facts, and return the position of the job.

        Return None if the epoch is not the latest epoch, if the step does not follow the last committed step, or
        if a later attempt has claimed the step log.

        Args:
            epoch: epoch in which the step is committed.
            step: number of the step.
            scale: factor by which the gradient of the step is multiplied.
            facts: facts about the step; None if there are none.
            generation: number of times that the step was restarted because its numbers were in doubt.
        """
        with self._transaction():
            standing = self._write(
                "UPDATE standing SET committed = ? WHERE epoch = ? AND committed = ? AND attempt = ?",
                step, epoch, step - 1, self._attempt,
            )  # fmt: skip
            if standing is None:
                return None
            encoded = None if facts is None else _steps.dump_json(facts).decode()
            rate = None if facts is None else facts.rate
            self._base.execute(
                "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?)",
                (step, scale, encoded, generation, rate),
            )
            self._base.execute("DELETE FROM steps WHERE step <= ?", (step - STEPS_KEPT,))
            return self.read()

    def validated(self, step: int, figures: Figures) -> None:
        """Write the metrics of the validation after a step, because a later attempt needs them for early stopping.

        Raises:
            StaleEpoch: a later attempt has claimed the step log.
        """
        with self._transaction():
            self._require_claimed()
            self._base.execute(
                "INSERT OR REPLACE INTO validations VALUES (?, ?)", (step, json.dumps(figures))
            )

    def begin_merge(self, step: int, base: int) -> int:
        """Write that a branch contributes to a merge after a step; return the version with which its round began.

        After a restart during the merge, this is the version that was written first.

        Args:
            step: last step of the round.
            base: version with which the round began.

        Raises:
            StaleEpoch: a later attempt has claimed the step log.
        """
        with self._transaction():
            self._require_claimed()
            self._base.execute("INSERT OR IGNORE INTO branch_merges (step, base) VALUES (?, ?)", (step, base))
            ((found,),) = self._rows("SELECT base FROM branch_merges WHERE step = ?", step)
            return int(found)

    def end_merge(self, step: int) -> None:
        """Write that all members of a branch have the weights of the merge after a step.

        Raises:
            StaleEpoch: a later attempt has claimed the step log.
        """
        with self._transaction():
            self._require_claimed()
            self._base.execute("UPDATE branch_merges SET is_over = 1 WHERE step = ?", (step,))

    def choose_computation(self, *, is_compiled: bool) -> None:
        """Write whether the job computes with compiled code, in this attempt and in later ones.

        Members of earlier attempts may compute differently, so no attempt can take them over.

        Raises:
            StaleEpoch: a later attempt has claimed the step log.
        """
        with self._transaction():
            self._require_claimed()
            self._base.execute("UPDATE standing SET is_compiled = ?, membership = NULL", (is_compiled,))

    def merge(self, record: MergeRecord) -> None:
        """Write the record of a merge of branches. This commits the merge.

        Raises:
            StaleEpoch: a later attempt has claimed the step log.
        """
        with self._transaction():
            self._require_claimed()
            self._base.execute(
                "INSERT INTO merges VALUES (?, ?)", (record.version, _merges.dump_json(record).decode())
            )

    def unmerge(self, version: int) -> None:
        """Delete the records of merges after a version, whose weights are lost.

        Raises:
            StaleEpoch: a later attempt has claimed the step log.
        """
        with self._transaction():
            self._require_claimed()
            self._base.execute("DELETE FROM merges WHERE version > ?", (version,))

    def offend(
        self, worker: Worker, step: int, what: str, *, is_grave: bool, accuser: Worker | None = None
    ) -> bool:
        """Write a machine's offence; return whether the job now quarantines the machine.

        Args:
            worker: id of the machine.
            step: number of the step.
            what: description of the offence, such as wrong numbers, for the user.
            is_grave: whether this offence alone suffices to quarantine the machine.
            accuser: the member whose report is the only evidence; None if there is other evidence.

        Raises:
            StaleEpoch: a later attempt has claimed the step log.
        """
        with self._transaction():
            self._require_claimed()
            before = self._base.execute("SELECT accuser FROM offences WHERE worker = ?", (worker,))
            is_over = is_grave or quarantines(accuser, [one for (one,) in before])
            self._base.execute(
                "INSERT INTO offences (worker, step, what, quarantines, accuser) VALUES (?, ?, ?, ?, ?)",
                (worker, step, what, is_over, accuser),
            )
            return is_over

    def quarantined(self) -> frozenset[Worker]:
        """Return the machines that the job must no longer use, because of their offences."""
        rows = self._rows("SELECT DISTINCT worker FROM offences WHERE quarantines")
        return frozenset(worker for (worker,) in rows)

    def rewind(self, step: int, version: int = 0) -> None:
        """Go back to the step of a checkpoint, or to step 0, for an attempt that takes over no members.

        This begins a new epoch, and deletes the membership and the later steps and validations.

        Args:
            step: step of the checkpoint.
            version: number of merges that the weights of the checkpoint include; the branch must repeat later merges.

        Raises:
            StaleEpoch: a later attempt has claimed the step log.
        """
        with self._transaction():
            rewound = self._write(
                "UPDATE standing SET epoch = epoch + 1, committed = ?, membership = NULL WHERE attempt = ?",
                step, self._attempt,
            )  # fmt: skip
            if rewound is None:
                raise superseded()
            self._base.execute("DELETE FROM steps WHERE step > ?", (step,))
            self._base.execute("DELETE FROM validations WHERE step > ?", (step,))
            self._base.execute("DELETE FROM branch_merges WHERE step > ? OR base < ?", (step, version))
            self._base.execute("UPDATE branch_merges SET is_over = 0")

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self) -> Standing:
        """Return the position of the job."""
        (found,) = self._rows(
            "SELECT epoch, committed, coalesce(scale, 1.0), coalesce(generation, 0), rate "
            "FROM standing LEFT JOIN steps ON step = committed"
        )
        return Standing(*found)

    @property
    def is_compiled(self) -> bool | None:
        """Whether the job computes with compiled code; None before the choice."""
        ((chosen,),) = self._rows("SELECT is_compiled FROM standing")
        return None if chosen is None else bool(chosen)

    @property
    def group(self) -> GroupFacts | None:
        """Facts about the job's members; None after `rewind` and `choose_computation`, until `lay` is called."""
        ((written,),) = self._rows("SELECT membership FROM standing")
        return None if written is None else _groups.validate_json(written)

    def steps(self, after: int) -> list[StepFacts]:
        """Return the facts about committed steps after ``after``, in order; omit steps whose facts the log lacks."""
        query = "SELECT facts FROM steps WHERE step > ? AND facts IS NOT NULL ORDER BY step"
        return [_steps.validate_json(facts) for (facts,) in self._rows(query, after)]

    def updates(self) -> Updates:
        """Return the update factors and learning rates of the committed steps that are still in the log."""
        rows = self._rows("SELECT step, scale, rate FROM steps ORDER BY step")
        rates = {step: rate for step, _, rate in rows if rate is not None}
        return Updates({step: scale for step, scale, _ in rows}, rates)

    def validations(self) -> tuple[tuple[int, Figures], ...]:
        """Return step and metrics of each validation, by step in ascending order."""
        rows = self._rows("SELECT step, figures FROM validations ORDER BY step")
        return tuple((step, json.loads(figures)) for step, figures in rows)

    def is_merging(self, step: int) -> bool:
        """Return whether a merge after a step has begun but is not complete: some members lack its weights."""
        return bool(self._rows("SELECT 1 FROM branch_merges WHERE step = ? AND NOT is_over", step))

    @property
    def open_merge(self) -> int | None:
        """Step after which a branch contributed to a merge that its members have not applied yet; None without one."""
        ((step,),) = self._rows("SELECT max(step) FROM branch_merges WHERE NOT is_over")
        return None if step is None else int(step)

    def merges(self) -> list[MergeRecord]:
        """Return the records of all merges, in order."""
        return [
            _merges.validate_json(record)
            for (record,) in self._rows("SELECT record FROM merges ORDER BY version")
        ]

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    # -- the file ----------------------------------------------------------------------------------------------------

    def _write(self, statement: str, *values: float | str) -> Standing | None:
        with self._translated():
            return self.read() if self._base.execute(statement, values).rowcount == 1 else None

    def _rows(self, query: str, *values: float | str) -> list[Any]:
        with self._translated():
            return self._base.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit all writes of the block together, or none of them."""
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
                f"{self._path} cannot be used: {failure}",
                hint="free space on the server's disk, then resume the job",
            ) from failure


def superseded() -> StaleEpoch:
    """Return the error for a refused write to the step log, or for an attempt that a later attempt has replaced."""
    return StaleEpoch(
        "another coordinator has taken over this job", hint="no action needed: follow the job's other attempt"
    )
