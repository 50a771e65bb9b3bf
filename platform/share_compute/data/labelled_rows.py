"""Reads columns of .csv, .jsonl and .parquet files, and from them texts with labels."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from share_compute.data.parquet_rows import record_batches
from share_compute.data.reading import parse_line, require_short_lines
from share_compute.data.table_reading import names_of, no_column, read_csv, unreadable
from share_compute.errors import UserError
from share_compute.files.field_errors import Problems
from share_compute.files.plain_files import open_unlinked
from share_compute.quantities import clipped
from share_compute.specification import DataSpec

MOST_LABEL_CHARACTERS = 1_000
_CHECKED_LINES = 1_000
"""Number of lines of a .jsonl file in which a column must appear."""


@dataclass(frozen=True, slots=True)
class LabelledText:
    """A row of the data: a text, or a pair of texts, and its label."""

    text: str
    pair: str | None
    label: str | None
    """The label; None for pairs of texts that belong together."""


def check_columns(data: DataSpec) -> None:
    """Raise UserError, naming field and file, unless all files have the columns of texts with labels."""
    for file in data.all_files:
        problems = Problems()
        known = names_in(file)
        for field, column in data.text_columns.items():
            if column not in known:
                hint = f"set {field} to a column of the file: {', '.join(map(clipped, known[:20]))}"
                problems.note(no_column(column, file, known, hint))
        problems.require_none()


def read_labelled(file: Path, data: DataSpec) -> Iterator[list[LabelledText]]:
    """Yield the rows of a file in blocks.

    Args:
        file: a file of the job, checked by `check_columns`.
        data: names of the columns.

    Raises:
        UserError: the file cannot be read, has no rows, or a row has no text or no label.
    """
    fields = data.text_columns
    number = 0
    try:
        for block in column_blocks(file, list(fields.values())):
            rows = []
            for number, values in enumerate(block, start=number + 1):  # noqa: B020 - continues counting
                cells = dict(zip(fields, values, strict=True))
                text, *pair = (
                    _text(file, field, fields[field], number, value)
                    for field, value in cells.items()
                    if field != "data.labels.column"
                )
                label = None
                if data.labels is not None:
                    label = label_of(file, data.labels.column, number, cells["data.labels.column"])
                rows.append(LabelledText(text, pair[0] if pair else None, label))
            yield rows
    except (ValueError, OSError, pa.ArrowException) as failure:
        raise unreadable(file, failure) from failure
    if not number:
        raise UserError(f"data file {file} has no rows", hint="leave it out of data.files, or fill it")


def names_in(file: Path) -> list[str]:
    """Return the names of the columns of a file; of a .jsonl file those in its first 1,000 rows.

    Raises:
        UserError: the file cannot be read.
    """
    if file.suffix != ".jsonl":
        return names_of(file)
    require_short_lines(file)
    try:
        return sorted(set().union(*(row for _, row in islice(_lines(file), _CHECKED_LINES))))
    except (ValueError, OSError) as failure:
        raise unreadable(file, failure) from failure


def column_blocks(file: Path, columns: Sequence[str]) -> Iterator[Iterator[tuple[Any, ...]]]:
    """Yield blocks of rows; a row has the values of the columns, in this order.

    Raises:
        UserError: a line of a .jsonl file is not a JSON object.
        OSError: the file cannot be read.
        ValueError: the file is malformed.
        pyarrow.ArrowException: the file is malformed.
    """
    match file.suffix:
        case ".parquet":
            for batch in record_batches(file, columns):
                yield zip(*(batch.column(name).to_pylist() for name in columns), strict=True)
        case ".csv":
            with open_unlinked(file) as source:
                for batch in read_csv(source, columns, [""]):
                    yield zip(*(batch.column(name).to_pylist() for name in columns), strict=True)
        case _:
            require_short_lines(file)
            lines = _lines(file)
            while block := list(islice(lines, _CHECKED_LINES)):
                yield (tuple(row.get(name) for name in columns) for _, row in block)


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, row) of a .jsonl file; empty lines are left out."""
    with open_unlinked(file) as source, io.TextIOWrapper(source, "utf-8-sig") as text:
        for number, line in enumerate(text, start=1):
            if line.strip():
                yield number, parse_line(file, number, line)


def _text(file: Path, field: str, column: str, row: int, value: Any) -> str:
    if isinstance(value, str) and value.strip():
        try:
            value.encode()
        except UnicodeEncodeError as failure:  # JSON can encode half of a surrogate pair.
            raise unreadable(file, failure) from failure
        return value
    if value is None or isinstance(value, str):
        raise UserError(
            f"column {clipped(column)!r} of data file {file} has no text in row {row}",
            hint=f"remove the row, or name another column in {field}",
        )
    raise UserError(
        f"column {clipped(column)!r} of data file {file} has {type(value).__name__} in row {row}, not text",
        hint=f"name a column of texts in {field}",
    )


def label_of(file: Path, column: str, row: int, value: Any) -> str:
    """Return a label as text; whole numbers, true and false are labels, too.

    Raises:
        UserError: the value is not a label; the error names file, column and row.
    """
    label = str(value).strip() if isinstance(value, str | int) else ""
    if label and len(label) <= MOST_LABEL_CHARACTERS and label.isprintable():
        return label
    if value is None or value == "" or (isinstance(value, str) and not value.strip()):
        what = "no label"
    elif not label:
        what = f"{type(value).__name__}, no label,"
    elif len(label) > MOST_LABEL_CHARACTERS:
        what = f"a label of {len(label)} characters"
    else:
        what = "a label with control characters"
    raise UserError(
        f"column {clipped(column)!r} of data file {file} has {what} in row {row}",
        hint="labels are text or whole numbers: correct or remove the row, or choose another column",
    )
