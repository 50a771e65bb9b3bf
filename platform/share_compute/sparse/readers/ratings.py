"""Reader of ratings: tables (.csv, .parquet) with a column each for user, item and rating."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv

from share_compute.data.parquet_rows import record_batches
from share_compute.data.table_reading import names_of
from share_compute.errors import UserError
from share_compute.files.csv_batches import csv_batches
from share_compute.files.damage import unreadable, wrong_cells
from share_compute.files.plain_files import open_unlinked
from share_compute.files.strict import nearest
from share_compute.quantities import clipped
from share_compute.sparse.blocks import RawRows
from share_compute.sparse.keys import KEY_LIMIT
from share_compute.sparse.readers.checks import BLOCK_BYTES, are_plain, key_problem, value_problem, wrong_line
from share_compute.sparse.readers.parts import TRIPLE, TRIPLES_SUFFIX, WHOLE, FilePart

_HINT = "give columns user, item and rating: two whole numbers from 0 to 2^63 - 1, and a number"


def ratings_blocks(
    file: Path,
    columns: tuple[str, str, str] = ("user", "item", "rating"),
    block_bytes: int = BLOCK_BYTES,
    part: FilePart = WHOLE,
) -> Iterator[RawRows]:
    """Yield one row for each rating, with an entry of value 1 for the user and one for the item.

    Args:
        file: a .csv file with a header, a .parquet file, or a file written by `write_triples`.
        columns: names of the columns of user, item and rating.
        block_bytes: bytes of a .csv file to read at a time.
        part: part of the file; .parquet files are read whole.

    Raises:
        UserError: the file cannot be read, lacks a column, or has a wrong number.
    """
    if file.suffix == TRIPLES_SUFFIX:
        yield from _of_triples(file, block_bytes, part)
        return
    before = 0
    for batch in _batches(file, columns, block_bytes, part):
        try:
            users, items = (_keys(file, name, batch.column(name)) for name in columns[:2])
            targets = _values(file, columns[2], batch.column(columns[2]))
        except _WrongCell as cell:
            line = _place(file, before + cell.row, part)
            raise wrong_line(file, line, f"column {clipped(cell.column)!r}: {cell.problem}", _HINT) from None
        count = len(targets)
        before += count
        if count:
            yield _rated(np.stack([users, items], axis=1).ravel(), targets)


def write_triples(file: Path, columns: tuple[str, str, str], target: Path) -> None:
    """Write the ratings of a file as records of `TRIPLE`, which can be cut anywhere between records.

    Raises:
        UserError: the file cannot be read, lacks a column, or has a wrong number.
    """
    with target.open("wb") as output:
        for rows in ratings_blocks(file, columns):
            records = np.empty(len(rows), TRIPLE)
            records["user"], records["item"] = rows.keys.reshape(-1, 2).T
            records["rating"] = rows.targets
            output.write(records.tobytes())


def _of_triples(file: Path, block_bytes: int, part: FilePart) -> Iterator[RawRows]:
    rest = b""
    for content in part.blocks(file, block_bytes):
        whole = rest + content
        cut = len(whole) // TRIPLE.itemsize * TRIPLE.itemsize
        records, rest = np.frombuffer(whole[:cut], TRIPLE), whole[cut:]
        keys = np.stack([records["user"], records["item"]], axis=1).ravel()
        yield _rated(keys, records["rating"])


def _rated(keys: NDArray[np.uint64], ratings: NDArray[np.float64]) -> RawRows:
    count = len(ratings)
    starts = np.arange(count + 1, dtype=np.int64) * 2
    return RawRows(starts, keys, np.ones(2 * count), ratings, np.tile([False, True], count))


class _WrongCell(Exception):
    """A cell cannot be read."""

    def __init__(self, row: int, column: str, problem: str) -> None:
        super().__init__(problem)
        self.row, self.column, self.problem = row, column, problem


def _batches(file: Path, columns: tuple[str, str, str], block_bytes: int, part: FilePart) -> Iterator[Any]:
    _require_columns(file, columns)
    try:
        if file.suffix == ".parquet":
            batches = record_batches(file, columns)
        else:
            batches = _csv_batches(file, columns, block_bytes, part)
        yield from batches
    except (ValueError, OSError, KeyError, pa.ArrowException) as failure:
        wrong = wrong_cells(failure)
        if wrong is not None:
            raise wrong_line(file, _place(file, wrong.row - 1, part), f"it has {wrong}", _HINT) from failure
        raise unreadable(file, failure, _HINT) from failure


def _require_columns(file: Path, columns: tuple[str, str, str]) -> None:
    known = names_of(file)
    for name in columns:
        if name not in known:
            guess = nearest(name, known)
            raise UserError(
                f"data file {file} has no column {clipped(name)!r}"
                + (f"; did you mean {clipped(guess)!r}?" if guess else ""),
                hint=f"{_HINT}, or name the columns in data.columns",
            )
    if file.suffix == ".csv":
        with open_unlinked(file) as source:
            start = source.read(len(BOM_UTF8) + 1).removeprefix(BOM_UTF8)
        if start.startswith((b"\n", b"\r")):
            raise wrong_line(file, 1, "it is blank", "delete the blank lines before the header")


def _csv_batches(
    file: Path, columns: tuple[str, str, str], block_bytes: int, part: FilePart
) -> Iterator[Any]:
    with part.stream(file, block_bytes) as source:
        # All cells are read as text, because pyarrow infers types from the first block only.
        convert = csv.ConvertOptions(
            column_types=dict.fromkeys(columns, pa.string()),
            include_columns=list(columns),
            strings_can_be_null=False,
        )
        read = csv.ReadOptions(block_size=block_bytes, use_threads=False)
        parse = csv.ParseOptions(ignore_empty_lines=False, newlines_in_values=True)
        yield from csv_batches(source, read, parse, convert)


def _place(file: Path, row: int, part: FilePart) -> int:
    """Convert a row number of a part, from 0, to the line of a .csv file or the row of a .parquet file."""
    if file.suffix != ".csv":
        return row + 1
    return row + 1 + (part.lines_before(file) or 1)


def _keys(file: Path, name: str, cells: Any) -> NDArray[np.uint64]:
    try:
        if pa.types.is_dictionary(cells.type):
            cells = cells.dictionary_decode()
        if pa.types.is_floating(cells.type):
            cells = cells.cast(pa.string())
        if not cells.null_count:
            keys: NDArray[np.uint64] = cells.cast(pa.uint64()).to_numpy(zero_copy_only=False)
            if not (keys >= KEY_LIMIT).any():
                return keys
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        pass
    for row, cell in enumerate(cells.to_pylist()):
        problem = "a key has no value" if cell is None else key_problem(str(cell))
        if problem:
            raise _WrongCell(row, name, problem)
    raise UserError(f"column {clipped(name)!r} of data file {file} has no whole numbers", hint=_HINT)


def _values(file: Path, name: str, cells: Any) -> NDArray[np.float64]:
    try:
        if pa.types.is_dictionary(cells.type):
            cells = cells.dictionary_decode()
        values: NDArray[np.float64] = cells.cast(pa.float64()).to_numpy(zero_copy_only=False)
        if are_plain(values):
            return values
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        pass
    for row, cell in enumerate(cells.to_pylist()):
        problem = "a rating has no value" if cell is None else value_problem(str(cell))
        if problem:
            raise _WrongCell(row, name, problem)
    raise UserError(f"column {clipped(name)!r} of data file {file} has no numbers", hint=_HINT)
