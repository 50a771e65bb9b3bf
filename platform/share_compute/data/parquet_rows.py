"""Reads Parquet files in batches of limited size.

Parquet encodes repeated values compactly, so a small file can decode to gigabytes. Therefore text columns are read in
dictionary encoding, and batches are cut by their decoded size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from share_compute.errors import UserError
from share_compute.files.plain_files import open_unlinked
from share_compute.quantities import bytes_text

MOST_BATCH_BYTES = 32 << 20
"""Maximum decoded size of a batch of several rows, in bytes."""
MOST_ROW_BYTES = 64 << 20
_MOST_ROWS = 1_000
_MOST_VALUES = 1 << 25
"""Maximum number of values of one column in one row group."""
_VALUE_BYTES = 8


def record_batches(file: Path, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """Yield the rows of a .parquet file as pyarrow record batches of bounded size.

    Args:
        file: the file.
        columns: names of the columns to read; None for all.

    Raises:
        UserError: a row is too large, or a row group has too many values in one column.
        OSError: the file cannot be read.
        ValueError: the file is not a .parquet file.
    """
    with open_unlinked(file) as source:
        plain = parquet.ParquetFile(source)
        metadata, schema = plain.metadata, plain.schema_arrow
        leaves = [
            index
            for index in range(metadata.num_columns)
            if columns is None or _is_of(metadata.schema.column(index).path, columns)
        ]
        texts = [
            metadata.schema.column(index).path
            for index in leaves
            if metadata.schema.column(index).physical_type == "BYTE_ARRAY"
        ]
        rows = _rows_at_once(file, metadata, leaves)
        opened = parquet.ParquetFile(source, read_dictionary=texts)
        for batch in opened.iter_batches(batch_size=rows, columns=None if columns is None else list(columns)):
            for part in _cut(file, batch):
                yield _written_out(part, schema)


def _is_of(path: str, columns: Sequence[str]) -> bool:
    return any(path == column or path.startswith(f"{column}.") for column in columns)


def _rows_at_once(file: Path, metadata: Any, leaves: Sequence[int]) -> int:
    """Return the number of rows to read at a time, from the sizes that the file declares.

    Raises:
        UserError: a row group has too many values in one column.
    """
    row_bytes = 1.0
    # A value of fixed length takes all its bytes when it is decoded, even if the file stores it only once, in a
    # dictionary.
    lengths = [max(_VALUE_BYTES, metadata.schema.column(index).length or 0) for index in leaves]
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        chunks = [group.column(index) for index in leaves]
        most_values = max((chunk.num_values for chunk in chunks), default=0)
        if most_values > _MOST_VALUES:
            raise UserError(
                f"{file} has {most_values} values in one column of a row group; at most {_MOST_VALUES} are read",
                hint="write the file with smaller row groups, or shorter lists",
            )
        group_bytes = sum(
            chunk.num_values * length + max(0, chunk.total_uncompressed_size)
            for chunk, length in zip(chunks, lengths, strict=True)
        )
        row_bytes = max(row_bytes, group_bytes / max(1, group.num_rows))
    return max(1, min(_MOST_ROWS, int(MOST_BATCH_BYTES / row_bytes)))


def _cut(file: Path, batch: Any) -> Iterator[Any]:
    """Cut a batch into parts of at most `MOST_BATCH_BYTES` when decoded, or of one row.

    Raises:
        UserError: a row is larger than `MOST_ROW_BYTES`.
    """
    size_bytes = sum(map(_size, batch.columns))
    if batch.num_rows <= 1:
        if size_bytes > MOST_ROW_BYTES:
            raise UserError(
                f"{file} has a row of {bytes_text(size_bytes)}; at most {bytes_text(MOST_ROW_BYTES)} are read",
                hint="split the row, or leave the column out",
            )
        yield batch
    elif size_bytes > MOST_BATCH_BYTES:
        half = batch.num_rows // 2
        yield from _cut(file, batch.slice(0, half))
        yield from _cut(file, batch.slice(half))
    else:
        yield batch


def _size(array: Any) -> int:
    """Estimate the size in bytes that an array has when it is decoded."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        if not _is_text(kind.value_type):
            return int(array.nbytes)
        lengths = pc.take(pc.binary_length(array.dictionary), array.indices)
        return int(pc.sum(lengths).as_py() or 0) + _VALUE_BYTES * len(array)
    if pa.types.is_map(kind):
        return _size(array.keys) + _size(array.items) + _VALUE_BYTES * len(array)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _size(array.flatten()) + _VALUE_BYTES * len(array)
    if pa.types.is_struct(kind):
        return sum(map(_size, array.flatten()))
    return int(array.nbytes)


def _is_text(kind: Any) -> bool:
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(is_one(kind) for is_one in kinds)


def _written_out(batch: Any, schema: Any) -> Any:
    """Convert the columns of a batch to the types that the file declares."""
    # Batches have columns in the order of the request, which may differ from the order in the file.
    wanted = pa.schema([schema.field(name) for name in batch.schema.names])
    columns = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(batch.columns, wanted, strict=True)
    ]
    return pa.record_batch(columns, schema=wanted)
