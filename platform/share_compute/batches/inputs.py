"""Read the input rows of a batch, one part at a time.

`Inputs.check` raises an error for a line that cannot be parsed. `Inputs.parts` yields a row with a problem instead.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import xxhash
from pyarrow import ArrowException, parquet

from share_compute.data.parquet_rows import record_batches
from share_compute.errors import UserError
from share_compute.files.damage import unreadable
from share_compute.files.field_errors import MOST_NAMED, cut
from share_compute.files.plain_files import open_unlinked
from share_compute.files.plain_yaml import json_problem
from share_compute.files.strict import nearest
from share_compute.quantities import bytes_text

_BOM = b"\xef\xbb\xbf"
_FIRST_ROWS = 100
"""Maximum number of rows of each file that `Inputs.check` examines."""
_PIECE_BYTES = 1 << 20
MOST_LINE_BYTES = 64 << 20
"""Maximum length of a line, in bytes."""
_MOST_PART_BYTES = 256 << 20
"""Maximum memory for the values of one part, as `_weight` estimates it."""


@dataclass(frozen=True, slots=True)
class InputRow:
    """One input row."""

    number: int
    """Number of the row, counted from 0 over all files in order."""
    value: Any
    """Value of the input column; None if the row has a problem."""
    problem: str | None = None
    """Reason why the row has no value; None if the row has a value."""


@dataclass(frozen=True, slots=True)
class Survey:
    """Row counts and hashes of a batch's input files."""

    rows: tuple[int, ...]
    """Number of rows in each file."""
    digests: tuple[str, ...]
    """128-bit XXH3 hash of each file in hexadecimal; byte order marks of .jsonl files are left out."""

    @property
    def total(self) -> int:
        """Number of rows in all files."""
        return sum(self.rows)


class Inputs:
    """Reader of a batch's input files.

    Args:
        files: .jsonl or .parquet files, all of one kind.
        column: column with the input of the model.
    """

    def __init__(self, files: Sequence[Path], column: str) -> None:
        self.files = tuple(files)
        self.column = column
        self.is_parquet = self.files[0].suffix == ".parquet"

    def check(self, kind: type[str] | type[list[Any]], ours: Collection[str]) -> None:
        """Check that the first rows of each file can be parsed and have the input column.

        Args:
            kind: type that at least one value of the column must have.
            ours: columns into which answers are written; no file may have one of them.

        Raises:
            UserError: a file cannot be read, has no rows, or fails this check.
        """
        for file in self.files:
            columns, values = self._beginning(file)
            if self.column not in columns:
                shown = [cut(name) for name in columns[:MOST_NAMED]]
                guess = nearest(self.column, shown)
                more = f" and {len(columns) - len(shown)} more" if len(columns) > len(shown) else ""
                raise UserError(
                    f"{file} has no column {self.column!r}" + (f"; did you mean {guess!r}?" if guess else ""),
                    hint=f"name one of its columns: {', '.join(shown)}{more}",
                )
            taken = [name for name in columns if name in ours]
            if taken:
                raise UserError(
                    f"{file} has a column {taken[0]!r}, into which answers are written",
                    hint="rename that column",
                )
            if not any(isinstance(value, kind) for value in values):
                found = type(values[0]).__name__ if values else "nothing"
                wanted = "text" if kind is str else "lists of messages"
                raise UserError(
                    f"column {self.column!r} of {file} holds {found}, not {wanted}, in its first rows",
                    hint="name another column",
                )

    def _beginning(self, file: Path) -> tuple[list[str], list[Any]]:
        """Return a file's column names, and the non-null values of the input column in its first rows."""
        if self.is_parquet:
            with reading(file), open_unlinked(file) as opened:
                facts = parquet.ParquetFile(opened)
                columns, is_empty = facts.schema_arrow.names, not facts.metadata.num_rows
            found = self._raw_of(file) if self.column in columns else iter(())
            values = [raw.as_py() for raw in islice(found, _FIRST_ROWS)]
        else:
            rows = list(islice(self._objects(file), _FIRST_ROWS))
            columns, is_empty = list(dict.fromkeys(name for row in rows for name in row)), not rows
            values = [row.get(self.column) for row in rows]
        if is_empty:
            raise UserError(f"{file} holds no rows", hint="leave it out, or fill it")
        return columns, [value for value in values if value is not None]

    def survey(self) -> Survey:
        """Count the rows of all files, and hash their content.

        Raises:
            UserError: a file cannot be read, or no file has rows.
        """
        found = [self._survey(file) for file in self.files]
        survey = Survey(tuple(rows for rows, _ in found), tuple(digest for _, digest in found))
        if not survey.total:
            raise UserError("the files hold no rows", hint="fill them, and submit the job again")
        return survey

    def _survey(self, file: Path) -> tuple[int, str]:
        digest, rows = xxhash.xxh3_128(), 0
        with reading(file):
            if not self.is_parquet:
                for line in _lines(file):
                    digest.update(line)
                    rows += _is_row(line)
                return rows, digest.hexdigest()
            with open_unlinked(file) as opened:
                while piece := opened.read(_PIECE_BYTES):
                    digest.update(piece)

                opened.seek(0)
                return int(parquet.read_metadata(opened).num_rows), digest.hexdigest()

    def parts(self, size: int, done: Collection[int]) -> Iterator[tuple[int, list[InputRow]]]:
        """Yield (number, rows) of each part that is not in ``done``.

        Rows that would take a part beyond `_MOST_PART_BYTES` get a problem instead of a value.

        Args:
            size: number of rows in a part; the last one may have fewer.
            done: numbers of the parts to skip.

        Raises:
            UserError: a file cannot be read.
        """
        rows = enumerate(self._raw())
        for number in count():
            part: list[InputRow] = []
            held, taken = 0, 0
            for index, raw in islice(rows, size):
                taken += 1
                if number in done:
                    continue
                row = self._row(index, raw)
                held += _weight(row.value)
                full = f"the rows before it in its part hold more than {bytes_text(_MOST_PART_BYTES)}"
                part.append(row if held <= _MOST_PART_BYTES else InputRow(index, None, full))
            if not taken:
                return
            if number not in done:
                yield number, part

    def _raw(self) -> Iterator[Any]:
        """Yield non-blank lines of .jsonl files, or values of the input column of .parquet files."""
        for file in self.files:
            yield from self._raw_of(file)

    def _raw_of(self, file: Path) -> Iterator[Any]:
        with reading(file):
            if self.is_parquet:
                for batch in record_batches(file, [self.column]):
                    yield from batch.column(0)
            else:
                yield from filter(_is_row, _lines(file))

    def _row(self, number: int, raw: Any) -> InputRow:
        if self.is_parquet:
            value = raw.as_py()
        else:
            row = parsed(raw)
            if isinstance(row, str):
                return InputRow(number, None, row)
            value = row.get(self.column)
        if value is None:
            return InputRow(number, None, f"column {self.column!r} is missing or null")
        return InputRow(number, value)

    def _objects(self, file: Path) -> Iterator[dict[str, Any]]:
        """Yield the rows of one .jsonl file.

        Raises:
            UserError: the file cannot be read, or a row is not a JSON object.
        """
        with reading(file):
            for number, line in enumerate(_lines(file), start=1):
                if not _is_row(line):
                    continue
                row = parsed(line)
                if isinstance(row, str):
                    raise UserError(
                        f"line {number} of {file}: {row}",
                        hint='put one JSON object on each line: {"text": "..."}',
                    )
                yield row

    def tables(self) -> Iterator[Any]:
        """Yield all rows of .parquet files in order, as pyarrow record batches.

        Raises:
            UserError: a file cannot be read.
        """
        for file in self.files:
            with reading(file):
                yield from record_batches(file)

    def objects(self) -> Iterator[dict[str, Any]]:
        """Yield all rows of .jsonl files in order; ``{}`` for each that is not a JSON object.

        Raises:
            UserError: a file cannot be read.
        """
        for file in self.files:
            with reading(file):
                for line in filter(_is_row, _lines(file)):
                    row = parsed(line)
                    yield {} if isinstance(row, str) else row


def parsed(line: bytes) -> dict[str, Any] | str:
    """Return the JSON object on a line, or a message that says why it is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as failure:
        problem = (
            json_problem(failure)
            if isinstance(failure, json.JSONDecodeError)
            else "a number or its nesting is too large"
        )
        return f"the row is not JSON: {problem.removeprefix('line 1, ')}"
    return row if isinstance(row, dict) else "the row is not a JSON object"


def _weight(value: Any) -> int:
    """Estimate the bytes that a value takes in memory."""
    if isinstance(value, str):
        return len(value) + 64
    if isinstance(value, dict):
        return 64 + sum(len(name) + 64 + _weight(item) for name, item in value.items())
    return 64 + sum(map(_weight, value)) if isinstance(value, list) else 64


def _is_row(line: bytes) -> bool:
    return not line.isspace() and bool(line)


def _lines(file: Path) -> Iterator[bytes]:
    with open_unlinked(file) as opened:
        while line := opened.readline(MOST_LINE_BYTES):
            if len(line) == MOST_LINE_BYTES and not line.endswith(b"\n"):
                raise UserError(
                    f"{file} has a line of more than {MOST_LINE_BYTES >> 20} MiB",
                    hint="put one JSON object on each line",
                )
            yield line.removeprefix(_BOM)


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Convert an `OSError`, a `ValueError` or an error of pyarrow to a `UserError` that names the file."""
    try:
        yield
    except (OSError, ValueError, ArrowException) as failure:
        hint = "check its rights, and that its content is what its suffix says"
        raise unreadable(file, failure, hint) from failure
