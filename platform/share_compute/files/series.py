"""Writes the series of a training job as CSV, JSON or Parquet, in pieces of bounded size."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    import pyarrow as pa

SeriesFormat: TypeAlias = Literal["csv", "json", "parquet"]
Row: TypeAlias = Mapping[str, Any]
_ROWS = 1_000
"""Number of rows in a piece."""
_GROUP_ROWS = 20_000
"""Number of rows in a row group of a Parquet file."""


def write_series(
    rows: Iterable[Row], columns: Mapping[str, type[int | float | str]], format_: SeriesFormat
) -> Iterator[bytes]:
    """Yield a file with one row for each element of ``rows``; only a bounded number of rows is in memory.

    Args:
        rows: values by column; values that are missing or None are empty. Other columns are left out.
        columns: type of each column, in order.
        format_: CSV has a header. JSON is an array of objects without empty values, one on each line.
    """
    writers: dict[SeriesFormat, Callable[[Iterable[Row], Mapping[str, type]], Iterator[bytes]]] = {
        "csv": _csv,
        "json": _json,
        "parquet": _parquet,
    }
    return writers[format_](rows, columns)


def _parts(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    source = iter(rows)
    while part := list(islice(source, size)):
        yield part


def _csv(rows: Iterable[Row], columns: Mapping[str, type]) -> Iterator[bytes]:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for part in chain([()], _parts(rows, _ROWS)):
        writer.writerows(part)
        yield text.getvalue().encode()
        text.seek(0)
        text.truncate()


def _json(rows: Iterable[Row], columns: Mapping[str, type]) -> Iterator[bytes]:
    before = "["
    for part in _parts(rows, _ROWS):
        lines = []
        for row in part:
            data = {name: row[name] for name in columns if row.get(name) is not None}
            lines.append(f"{before}\n{json.dumps(data)}")
            before = ","
        yield "".join(lines).encode()
    yield b"[]\n" if before == "[" else b"\n]\n"


class _Sink(io.RawIOBase):
    """A file that keeps the bytes written since the last call of `drain`."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        part = bytes(data)
        self._parts.append(part)
        return len(part)

    def drain(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


def _parquet(rows: Iterable[Row], columns: Mapping[str, type]) -> Iterator[bytes]:
    import pyarrow as pa  # noqa: PLC0415 - heavy
    from pyarrow import parquet  # noqa: PLC0415

    types: dict[type, pa.DataType] = {int: pa.int64(), float: pa.float64(), str: pa.string()}
    schema = pa.schema([(name, types[kind]) for name, kind in columns.items()])
    sink = _Sink()
    with parquet.ParquetWriter(sink, schema) as writer:
        for part in _parts(rows, _GROUP_ROWS):
            writer.write_table(
                pa.table({name: [row.get(name) for row in part] for name in columns}, schema=schema)
            )
            yield sink.drain()
    yield sink.drain()
