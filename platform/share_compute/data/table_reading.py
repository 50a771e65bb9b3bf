"""Reads tables (.csv, .parquet) in blocks of rows, as numbers: categories are coded by their first appearance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import csv, parquet

from share_compute.data.parquet_rows import record_batches
from share_compute.errors import UserError
from share_compute.files.plain_files import open_unlinked
from share_compute.files.strict import nearest
from share_compute.specification import TableSpec

EMPTY = ("", "NA", "N/A", "NaN", "nan", "null", "NULL")
"""Cells of a .csv file that have no value."""
MOST_CATEGORIES = 10_000
"""Maximum number of categories of one column."""
MOST_COLUMNS = 10_000
_BLOCK_BYTES = 4 << 20
"""Bytes of a .csv file that are read at a time. A row must be shorter."""


def columns_of(files: Sequence[Path], spec: TableSpec) -> tuple[str, ...]:
    """Return the names of the features, and check that all files have these columns and the target.

    Raises:
        UserError: a file cannot be read, lacks a column, or has other columns than the first file.
    """
    first: list[str] = []
    features: tuple[str, ...] = ()
    for file in files:
        names = _names(file)
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"data file {file} has two columns {twice!r}", hint="rename one of them")
        if not first:
            first = names
            features = spec.features or tuple(name for name in names if name != spec.target)
        if spec.features is None and set(names) != set(first):
            only = {
                files[0].name: sorted(set(first) - set(names)),
                file.name: sorted(set(names) - set(first)),
            }
            told = "; ".join(f"only {name} has {', '.join(more[:5])}" for name, more in only.items() if more)
            raise UserError(
                f"data file {file} has other columns than {files[0].name}: {told}",
                hint="give all files the same columns, or name the features in data.table.features",
            )
        for name, place in ((spec.target, "target"), *((one, "features") for one in features)):
            if name not in names:
                guess = nearest(name, names)
                raise UserError(
                    f"data file {file} has no column {name!r}"
                    + (f"; did you mean {guess!r}?" if guess else ""),
                    hint=f"set data.table.{place} to columns of the file: {', '.join(names[:20])}",
                )
    unknown = [name for name in spec.categorical if name not in features]
    if unknown:
        raise UserError(
            f"data file {files[0]} has no column {unknown[0]!r}",
            hint=f"set data.table.categorical to some of the features: {', '.join(features[:20])}",
        )
    if not features or len(features) > MOST_COLUMNS:
        raise UserError(
            f"the table has {len(features)} columns beside the target; 1 to {MOST_COLUMNS} are read",
            hint="name the features in data.table.features",
        )
    return features


def _names(file: Path) -> list[str]:
    try:
        with open_unlinked(file) as source:
            if file.suffix == ".parquet":
                return list(parquet.read_schema(source).names)
            return list(csv.open_csv(source, csv.ReadOptions(block_size=_BLOCK_BYTES)).schema.names)
    except (ValueError, OSError) as failure:
        raise _unreadable(file, failure) from failure


@dataclass(slots=True)
class TableReader:
    """Reads tables, and assigns codes to their categories.

    Args:
        spec: meaning of the columns.
        features: names of the features.
        target_is_class: whether the target is a category; if not, it is a number.
    """

    spec: TableSpec
    features: tuple[str, ...]
    target_is_class: bool
    categories: dict[str, dict[str, int]] = field(default_factory=dict)
    """Code of each category, by column."""
    dropped: int = 0
    """Rows that were dropped because a feature has no value."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of a block: the features, then the target."""
        return (*self.features, self.spec.target)

    def is_categorical(self, column: str) -> bool:
        """Return whether a column has categories; if not, it has numbers."""
        return self.target_is_class if column == self.spec.target else column in self.spec.categorical

    def blocks(self, file: Path) -> Iterator[NDArray[np.float64]]:
        """Yield the rows of a file in blocks ``[rows, columns]``: numbers, codes of categories, and NaN for no value.

        Raises:
            UserError: the file cannot be read, a value is not what its column holds, or a value is missing that must
                not be.
        """
        before = 0
        try:
            for batch in self._batches(file):
                block = np.empty((batch.num_rows, len(self.columns)))
                for place, name in enumerate(self.columns):
                    block[:, place] = self._numbers(file, name, batch.column(name), before)
                before += batch.num_rows
                yield self._without_missing(file, block, before - len(block))
        except (ValueError, OSError) as failure:
            raise _unreadable(file, failure) from failure
        if not before:
            raise UserError(f"data file {file} has no rows", hint="leave it out, or fill it")

    def _batches(self, file: Path) -> Iterator[Any]:
        if file.suffix == ".parquet":
            yield from record_batches(file, self.columns)
            return
        with open_unlinked(file) as source:
            # All cells are read as text, because pyarrow infers types from the first block only.
            convert = csv.ConvertOptions(
                column_types=dict.fromkeys(self.columns, pa.string()),
                include_columns=list(self.columns),
                null_values=list(EMPTY),
                strings_can_be_null=True,
            )
            yield from csv.open_csv(source, csv.ReadOptions(block_size=_BLOCK_BYTES), None, convert)

    def _numbers(self, file: Path, name: str, cells: Any, before: int) -> NDArray[np.float64]:
        """Return a column as numbers or as codes, ``[rows]``; NaN for cells without a value."""
        if pa.types.is_dictionary(cells.type):
            cells = cells.dictionary_decode()
        is_text = pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type)
        is_number = pa.types.is_boolean(cells.type) or any(
            kind(cells.type) for kind in (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
        )
        if not is_text and not is_number and not pa.types.is_null(cells.type):
            raise UserError(
                f"column {name!r} of data file {file} has the type {cells.type}",
                hint="tables are read from columns of numbers and text",
            )
        if pa.types.is_floating(cells.type):
            cells = pc.if_else(pc.is_nan(cells), pa.scalar(None, cells.type), cells)
        if self.is_categorical(name):
            return self._codes(name, cells.cast(pa.string()))
        if is_text:
            cells = self._parsed(file, name, pc.utf8_trim_whitespace(cells), before)
        # Bits have no cast to float64 in pyarrow.
        small = cells.cast(pa.uint8()) if pa.types.is_boolean(cells.type) else cells
        numbers: NDArray[np.float64] = small.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        wrong = np.flatnonzero(np.isinf(numbers))
        if wrong.size:
            raise UserError(
                f"column {name!r} of data file {file} is infinite in row {before + int(wrong[0]) + 1}",
                hint="replace the value, or leave the cell empty",
            )
        return numbers

    def _parsed(self, file: Path, name: str, cells: Any, before: int) -> Any:
        try:
            return cells.cast(pa.float64())
        except pa.ArrowInvalid:
            for row, value in enumerate(cells.to_pylist(), start=before + 1):
                if value is not None and not _is_number(value):
                    raise _no_number(file, name, row, value, is_target=name == self.spec.target) from None
            raise

    def _codes(self, name: str, cells: Any) -> NDArray[np.float64]:
        known = self.categories.setdefault(name, {})
        encoded = cells.dictionary_encode()
        codes = [known.setdefault(value, len(known)) for value in encoded.dictionary.to_pylist()]
        if len(known) > MOST_CATEGORIES:
            raise UserError(
                f"column {name!r} has more than {MOST_CATEGORIES} categories",
                hint="use a column of numbers, or group its rare categories",
            )
        found = np.asarray([*codes, np.nan])
        places = pc.fill_null(encoded.indices, len(codes)).to_numpy(zero_copy_only=False)
        values: NDArray[np.float64] = found[places]
        return values

    def _without_missing(self, file: Path, block: NDArray[np.float64], before: int) -> NDArray[np.float64]:
        missing = np.isnan(block)
        if missing[:, -1].any():
            row = before + int(np.flatnonzero(missing[:, -1])[0]) + 1
            raise UserError(
                f"the target {self.spec.target!r} of data file {file} has no value in row {row}",
                hint="remove rows without a target",
            )
        if self.spec.missing == "fill" or not missing.any():
            return block
        if self.spec.missing == "drop":
            keeps = ~missing.any(axis=1)
            self.dropped += len(block) - int(keeps.sum())
            return block[keeps]
        row, column = (int(each[0]) for each in np.nonzero(missing))
        raise UserError(
            f"column {self.columns[column]!r} of data file {file} has no value in row {before + row + 1}",
            hint="set data.table.missing to fill or drop, or leave the column out of data.table.features",
        )


def _is_number(text: str) -> bool:
    try:
        pa.scalar(text).cast(pa.float64())
    except pa.ArrowInvalid:
        return False
    return True


def _no_number(file: Path, name: str, row: int, value: str, *, is_target: bool) -> UserError:
    hint = (
        "set task to tabular_classification, or choose a target of numbers"
        if is_target
        else "name the column in data.table.categorical, or correct the value"
    )
    return UserError(
        f"column {name!r} of data file {file} has {value[:40]!r} in row {row}, no number", hint=hint
    )


def _unreadable(file: Path, failure: Exception) -> UserError:
    reason = (str(failure).splitlines() or [type(failure).__name__])[0]
    return UserError(
        f"data file {file} cannot be read as {file.suffix}: {reason}",
        hint="check that its content is what its suffix says, in UTF-8; rows of a .csv may have 4 MiB at most",
    )
