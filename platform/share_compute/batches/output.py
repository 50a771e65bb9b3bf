"""Write the output file of a batch: all input rows in order, each with its answer."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, time
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pyarrow import parquet

from share_compute.batches.inputs import Inputs, reading
from share_compute.batches.parts import Parts, whole
from share_compute.errors import UserError
from share_compute.files.plain_files import open_unlinked

_BATCH_ROWS = 1_000
Format = Literal["jsonl", "parquet"]


def check_columns(files: Sequence[Path]) -> None:
    """Check that the schemas of .parquet files can be merged into one.

    Raises:
        UserError: a file cannot be read, or the schemas cannot be merged.
    """
    _united(files)


def write_output(inputs: Inputs, parts: Parts, target: Path, format_: Format) -> int:
    """Write all input rows with their answers to one file, atomically.

    Args:
        inputs: input rows.
        parts: finished parts with all answers.
        target: file to write.
        format_: format of the file.

    Returns:
        Size of the file in bytes.

    Raises:
        VerificationFailed: an answer is missing.
        UserError: an input file cannot be read, or the schemas of .parquet files cannot be merged.
        OSError: the output cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(".*.partial"):  # partial file of a killed attempt
        left.unlink(missing_ok=True)
    with whole(target) as partial:
        if format_ == "jsonl":
            _write_lines(inputs, parts, partial)
        elif inputs.is_parquet:
            _write_tables(_joined(inputs, parts), partial)
        else:
            _write_typed(inputs, parts, partial)
    return target.stat().st_size


def _write_lines(inputs: Inputs, parts: Parts, file: Path) -> None:
    answers = chain.from_iterable(table.to_pylist() for table in parts.tables())
    if inputs.is_parquet:
        rows: Iterator[dict[str, Any]] = chain.from_iterable(batch.to_pylist() for batch in inputs.tables())
    else:
        rows = inputs.objects()
    with file.open("wb") as opened:
        for row, answer in zip(rows, answers, strict=True):
            opened.write(_line({**row, **_without_nulls(answer)}))


def _without_nulls(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer without null columns and without null fields of its usage."""
    columns = {name: value for name, value in answer.items() if value is not None}
    if "usage" in columns:
        columns["usage"] = {name: value for name, value in columns["usage"].items() if value is not None}
    return columns


def _line(row: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:  # JSON has no NaN and no infinity
        text = json.dumps(_finite(row), ensure_ascii=False, default=_plain)
    try:
        return f"{text}\n".encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can escape
        return f"{json.dumps(_finite(row), default=_plain)}\n".encode()


def _plain(value: Any) -> Any:
    """Convert a value of a type that JSON lacks: bytes to base64, dates and times to ISO 8601, others to text."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if isinstance(value, date | datetime | time) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _joined(inputs: Inputs, parts: Parts) -> Iterator[Any]:
    """Yield the rows of .parquet files with their answers, as Arrow tables that all have one schema."""
    empty = _united(inputs.files).empty_table()
    answers = parts.tables()
    held = next(answers)
    for batch in inputs.tables():
        more = [held]
        while sum(table.num_rows for table in more) < batch.num_rows:
            more.append(next(answers))
        held = pa.concat_tables(more)
        rows = pa.concat_tables([empty, pa.Table.from_batches([batch])], promote_options="permissive")
        for field, column in zip(held.schema, held.slice(0, batch.num_rows).columns, strict=True):
            rows = rows.append_column(field, column)
        held = held.slice(batch.num_rows)
        yield rows


def _united(files: Sequence[Path]) -> Any:

    schemas = []
    for file in files:
        with reading(file), open_unlinked(file) as opened:
            schemas.append(parquet.read_schema(opened).remove_metadata())
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except MemoryError:  # pyarrow's is an ArrowException, too
        raise
    except pa.ArrowException as failure:
        raise UserError(
            f"the columns of the files do not fit together: {failure}",
            hint="submit a job for each, or ask for output.format jsonl",
        ) from failure


def _write_tables(tables: Iterator[Any], file: Path) -> None:

    first = next(tables)
    with parquet.ParquetWriter(file, first.schema) as writer:
        for table in chain([first], tables):
            writer.write_table(table)


class _Unfit(Exception):
    """Error: a value does not fit the type of its column."""

    def __init__(self, column: str) -> None:
        super().__init__(column)
        self.column = column


def _write_typed(inputs: Inputs, parts: Parts, file: Path) -> None:
    """Write rows of .jsonl files with their answers to a .parquet file.

    A column whose values have no common type that Parquet can store is written as JSON text.
    """
    types = _types(inputs)
    while True:
        try:
            _write_tables(_typed(inputs, parts, types), file)
        except _Unfit as unfit:
            types[unfit.column] = None
        else:
            return


def _typed(inputs: Inputs, parts: Parts, types: Mapping[str, Any]) -> Iterator[Any]:

    rows = inputs.objects()
    for answers in parts.tables():
        taken = list(islice(rows, answers.num_rows))
        ours = answers.column_names
        columns = {
            name: _array(name, [row.get(name) for row in taken], type_)
            for name, type_ in types.items()
            if name not in ours
        }
        yield pa.table([*columns.values(), *answers.columns], names=[*columns, *ours])


def _array(name: str, values: list[Any], type_: Any) -> Any:

    if type_ is None:
        return pa.array(
            [None if value is None else json.dumps(_finite(value)) for value in values], pa.string()
        )
    try:
        return pa.array(values, type_)
    except MemoryError:  # pyarrow's is an ArrowException, too
        raise
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as failure:
        raise _Unfit(name) from failure


def _types(inputs: Inputs) -> dict[str, Any]:
    """Return the Arrow type of each column.

    The type is None if a column's values have no common type that Parquet can store.
    """
    types: dict[str, Any] = {}
    rows = inputs.objects()
    while taken := list(islice(rows, _BATCH_ROWS)):
        for name in dict.fromkeys(name for row in taken for name in row):
            known = types.setdefault(name, pa.null())
            if known is not None:
                types[name] = _common(known, [row.get(name) for row in taken])
    return {name: type_ if _can_be_written(type_) else None for name, type_ in types.items()}


def _common(known: Any, values: list[Any]) -> Any:

    try:
        schemas = [pa.schema([("", type_)]) for type_ in (known, pa.array(values).type)]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except MemoryError:  # pyarrow's is an ArrowException, too
        raise
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return None


def _can_be_written(type_: Any) -> bool:
    """Return whether Parquet can store the type; it cannot store structs without fields."""
    try:
        parquet.write_table(pa.table({"": pa.array([], type_)}), pa.BufferOutputStream())
    except MemoryError:  # pyarrow's is an ArrowException, too
        raise
    except pa.ArrowException:
        return False
    return True
