"""Reads tables (.csv, .parquet) in blocks of rows, as numbers; codes of categories follow their first appearance."""

from __future__ import annotations

import csv as plain_csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import csv, parquet

from share_compute.data.parquet_rows import record_batches
from share_compute.errors import UserError
from share_compute.files import damage
from share_compute.files.csv_batches import csv_batches
from share_compute.files.field_errors import Problems, refused
from share_compute.files.plain_files import open_unlinked
from share_compute.files.strict import nearest
from share_compute.quantities import clipped
from share_compute.specification import TableSpec

EMPTY = ("", "NA", "N/A", "NaN", "nan", "null", "NULL")
"""Cells of a .csv file that have no value."""
MOST_CATEGORIES = 10_000
"""Maximum number of categories of one column."""
MOST_CATEGORY_CHARACTERS = 1_000
MOST_ALL_CATEGORIES = 1 << 16
"""Maximum number of categories of all features together."""
MOST_COLUMNS = 10_000
"""Maximum number of features."""
MOST_NAMES = 100_000
"""Maximum number of columns of a file, whether they are features or not."""
MOST_ROWS = 1 << 27
"""Maximum number of rows of all tables of a job."""
MOST_NUMBER = 1e37
"""Largest magnitude of a number. Larger numbers could become infinite as float32 when they are scaled."""
_MOST_MISSING = 20
"""Maximum number of missing columns that an error names; the search for similar names takes time for each."""
_MOST_CHECKED = 32
"""Maximum number of files whose values `check_tables` reads; each takes about 50 ms."""
_BLOCK_BYTES = 4 << 20
"""Bytes of a .csv file that are read at a time. A row must be shorter."""


def check_tables(
    files: Sequence[Path], spec: TableSpec, *, target_is_class: bool, in_features: int | None = None
) -> None:
    """Check the columns of tables, and the values in the first block of rows of the first .csv files.

    Columns of .parquet files have types, and their first block can have the size of the file.

    Args:
        files: the tables.
        spec: meaning of the columns.
        target_is_class: whether the target is a category.
        in_features: number of inputs of the model's first layer, if it is linear. It is compared only if no feature
            is a category, because all rows must be read to count the categories.

    Raises:
        UserError: a file cannot be used, or the first layer takes another number of inputs. The error has all problems.
    """
    features = columns_of(files, spec)
    reader = TableReader(spec, features, target_is_class)
    problems = Problems()
    if in_features not in (None, len(features)) and not spec.categorical:
        field = "model.layers.0.options.in_features"
        problems.note(
            refused(
                field,
                f"{in_features} does not fit the {len(features)} features of the table",
                f"set {field} to {len(features)}",
            )
        )
    for file in [one for one in files if one.suffix == ".csv"][:_MOST_CHECKED]:
        with problems.noted():
            next(reader.blocks(file), None)
    problems.require_none()


def columns_of(files: Sequence[Path], spec: TableSpec) -> tuple[str, ...]:
    """Return the names of the features, and check that all files have these columns and the target.

    Raises:
        UserError: files cannot be read, lack columns, or have other columns than the first file. The error has all
            problems, but at most `_MOST_MISSING` columns.
    """
    problems = Problems()
    left = _MOST_MISSING
    first: list[str] = []
    features: tuple[str, ...] = ()
    for file in files:
        names = names_of(file)
        known = set(names)
        if not first:
            first = names
            features = spec.features or tuple(name for name in names if name != spec.target)
        if spec.features is None and known != set(first):
            only = {files[0].name: sorted(set(first) - known), file.name: sorted(known - set(first))}
            told = "; ".join(f"only {name} has {_shown(more, 5)}" for name, more in only.items() if more)
            problems.note(
                UserError(
                    f"data file {file} has other columns than {files[0].name}: {told}",
                    hint="give all files the same columns, or name the features in data.table.features",
                )
            )
            continue
        wanted = ((spec.target, "target"), *((one, "features") for one in features))
        missing = [(name, place) for name, place in wanted if name not in known][:left]
        left -= len(missing)
        for name, place in missing:
            shown = _shown(names)
            hint = (
                f"set data.table.target to a column of the file: {shown}"
                if place == "target"
                else f"set data.table.features to columns of the file: {shown}"
            )
            problems.note(no_column(name, file, names, hint))
    for name in sorted(set(spec.categorical).difference(features))[:left]:
        hint = f"set data.table.categorical to some of the features: {_shown(features)}"
        problems.note(no_column(name, files[0], features, hint))
    if not features or len(features) > MOST_COLUMNS:
        problems.note(
            UserError(
                f"the table has {len(features)} columns beside the target; 1 to {MOST_COLUMNS} are read",
                hint="name the features in data.table.features",
            )
        )
    problems.require_none()
    return features


def no_column(name: str, file: Path, known: Sequence[str], hint: str) -> UserError:
    """Return the error for a missing column; ``known`` are names that may have been meant."""
    guess = nearest(name, known[:MOST_COLUMNS])
    problem = f"data file {file} has no column {clipped(name)!r}"
    return UserError(problem + (f"; did you mean {clipped(guess)!r}?" if guess else ""), hint=hint)


def names_of(file: Path) -> list[str]:
    """Return the names of the columns of a .csv or .parquet file.

    Raises:
        UserError: the file cannot be read, has too many columns, or has two of one name.
    """
    try:
        with open_unlinked(file) as source:
            if file.suffix == ".parquet":
                metadata = parquet.read_metadata(source)
                # Schemas of pyarrow take much memory for each column, so columns are counted first.
                _require_columns(file, metadata.num_columns)
                names = list(metadata.schema.to_arrow_schema().names)
            else:
                names = _header(source.read(_BLOCK_BYTES))
    except (ValueError, OSError, pa.ArrowException, plain_csv.Error) as failure:
        raise unreadable(file, failure) from failure
    _require_columns(file, len(names))
    known = set[str]()
    for name in names:
        if name in known:
            raise UserError(f"data file {file} has two columns {clipped(name)!r}", hint="rename one of them")
        known.add(name)
    return names


def _header(start: bytes) -> list[str]:
    """Return the names in the header of a .csv file that begins with ``start``.

    pyarrow is not used, because it takes 4 GB for a header of 500,000 names.
    """
    with io.TextIOWrapper(io.BytesIO(start), "utf-8-sig", newline="") as text:
        return next(filter(None, plain_csv.reader(text)), [])


def _require_columns(file: Path, count: int) -> None:
    if count > MOST_NAMES:
        raise UserError(
            f"data file {file} has {count} columns; at most {MOST_NAMES} are read",
            hint="write the file without the columns that are not needed",
        )


def read_csv(source: IO[bytes], columns: Sequence[str], empty: Sequence[str]) -> Iterator[Any]:
    """Yield the batches of a .csv file.

    Args:
        source: the opened file.
        columns: names of the columns to read. All cells are read as text, because pyarrow would infer types from the
            first block only.
        empty: cells that have no value.
    """
    convert = csv.ConvertOptions(
        column_types=dict.fromkeys(columns, pa.string()),
        include_columns=list(columns),
        null_values=list(empty),
        strings_can_be_null=True,
    )
    # Errors of pyarrow name the row only without threads.
    read = csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False)
    return csv_batches(source, read, csv.ParseOptions(newlines_in_values=True), convert)


def count_rows(files: Sequence[Path]) -> int:
    """Return the number of rows that .parquet files declare; .csv files declare none and count as 0.

    Raises:
        UserError: a file cannot be read, or there are more than `MOST_ROWS` rows.
    """
    rows = 0
    for file in files:
        if file.suffix == ".parquet":
            try:
                with open_unlinked(file) as source:
                    rows += parquet.read_metadata(source).num_rows
            except (ValueError, OSError, pa.ArrowException) as failure:
                raise unreadable(file, failure) from failure
        _require_rows(file, rows)
    return rows


def _require_rows(file: Path, rows: int) -> None:
    if rows > MOST_ROWS:
        raise UserError(
            f"the tables have more than {MOST_ROWS} rows, up to data file {file}",
            hint="give fewer rows",
        )


def _shown(names: Sequence[str], most: int = 20) -> str:
    return ", ".join(map(clipped, names[:most]))


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
    _rows: int = field(default=0, init=False)
    """Rows that were read, those that were dropped included."""
    _all_categories: int = field(default=0, init=False)
    """Number of categories of all features."""
    _categorical: frozenset[str] = field(init=False)
    """Columns with categories; the others have numbers."""

    def __post_init__(self) -> None:
        self._categorical = frozenset(
            (*self.spec.categorical, *([self.spec.target] if self.target_is_class else []))
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of a block: the features, then the target."""
        return (*self.features, self.spec.target)

    def blocks(self, file: Path) -> Iterator[NDArray[np.float64]]:
        """Yield the rows of a file in blocks ``[rows, columns]``: numbers, codes of categories, and NaN for no value.

        Raises:
            UserError: the file cannot be read, values do not fit their columns, or required values are missing. The
                error has the first wrong value of each column.
        """
        before = 0
        try:
            for batch in self._batches(file):
                self._rows += batch.num_rows
                _require_rows(file, self._rows)
                block = np.empty((batch.num_rows, len(self.columns)))
                problems = Problems()
                for place, name in enumerate(self.columns):
                    block[:, place] = 0.0
                    with problems.noted():
                        block[:, place] = self._numbers(file, name, batch.column(name), before)
                with problems.noted():
                    self._require_categories()
                with problems.noted():
                    block = self._without_missing(file, block, before)
                problems.require_none()
                before += batch.num_rows
                yield block
        except (ValueError, OSError, pa.ArrowException) as failure:
            raise unreadable(file, failure) from failure
        if not before:
            raise UserError(f"data file {file} has no rows", hint="leave it out, or fill it")

    def _batches(self, file: Path) -> Iterator[Any]:
        if file.suffix == ".parquet":
            yield from record_batches(file, self.columns)
            return
        with open_unlinked(file) as source:
            yield from read_csv(source, self.columns, EMPTY)

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
                f"column {clipped(name)!r} of data file {file} has the type {clipped(str(cells.type))}",
                hint="leave it out of data.table.features, or write it as numbers or text"
                if name != self.spec.target
                else "write the target as numbers or text",
            )
        if pa.types.is_floating(cells.type):
            cells = pc.if_else(pc.is_nan(cells), pa.scalar(None, cells.type), cells)
        if is_text:
            cells = pc.utf8_trim_whitespace(cells)
            if file.suffix == ".csv":
                is_empty = pc.is_in(cells, value_set=pa.array(EMPTY, cells.type))
                cells = pc.if_else(is_empty, pa.scalar(None, cells.type), cells)
        if name in self._categorical:
            return self._codes(file, name, cells.cast(pa.string()), before)
        if is_text:
            cells = self._parsed(file, name, cells, before)
        # pyarrow cannot cast booleans to float64.
        small = cells.cast(pa.uint8()) if pa.types.is_boolean(cells.type) else cells
        numbers: NDArray[np.float64] = small.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        wrong = np.flatnonzero(np.abs(numbers) > MOST_NUMBER)
        if wrong.size:
            value = numbers[wrong[0]]
            what = "infinite" if np.isinf(value) else f"{value:.3g}, beyond {MOST_NUMBER:g},"
            raise UserError(
                f"column {clipped(name)!r} of data file {file} is {what} in row {before + int(wrong[0]) + 1}",
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

    def _codes(self, file: Path, name: str, cells: Any, before: int) -> NDArray[np.float64]:
        encoded = cells.dictionary_encode()
        if (pc.max(pc.utf8_length(encoded.dictionary)).as_py() or 0) > MOST_CATEGORY_CHARACTERS:
            lengths = pc.fill_null(pc.utf8_length(cells), 0).to_numpy(zero_copy_only=False)
            row = int(np.argmax(lengths > MOST_CATEGORY_CHARACTERS))
            raise UserError(
                f"column {clipped(name)!r} of data file {file} has a category of {lengths[row]} characters in row "
                f"{before + row + 1}; at most {MOST_CATEGORY_CHARACTERS} are read",
                hint="shorten it, or leave the column out of data.table.features",
            )
        known = self.categories.setdefault(name, {})
        was = len(known)
        codes = [known.setdefault(value, len(known)) for value in encoded.dictionary.to_pylist()]
        if len(known) > MOST_CATEGORIES:
            raise UserError(
                f"column {clipped(name)!r} has more than {MOST_CATEGORIES} categories",
                hint="use a column of numbers, or group its rare categories",
            )
        self._all_categories += 0 if name == self.spec.target else len(known) - was
        found = np.asarray([*codes, np.nan])
        places = pc.fill_null(encoded.indices, len(codes)).to_numpy(zero_copy_only=False)
        values: NDArray[np.float64] = found[places]
        return values

    def _require_categories(self) -> None:
        if self._all_categories > MOST_ALL_CATEGORIES:
            raise UserError(
                f"the features have more than {MOST_ALL_CATEGORIES} categories together",
                hint="leave columns with many categories out of data.table.features",
            )

    def _without_missing(self, file: Path, block: NDArray[np.float64], before: int) -> NDArray[np.float64]:
        missing = np.isnan(block)
        is_wrong = np.asarray(missing.any(axis=0))
        if self.spec.missing != "refuse":
            is_wrong[:-1] = False
        problems = Problems()
        for column in np.flatnonzero(is_wrong):
            row = before + int(np.argmax(missing[:, column])) + 1
            problems.note(self._no_value(file, self.columns[column], row))
        problems.require_none()
        if self.spec.missing == "drop" and missing.any():
            keeps = ~missing.any(axis=1)
            self.dropped += len(block) - int(keeps.sum())
            return block[keeps]
        return block

    def _no_value(self, file: Path, name: str, row: int) -> UserError:
        if name == self.spec.target:
            return UserError(
                f"the target {clipped(name)!r} of data file {file} has no value in row {row}",
                hint="remove rows without a target",
            )
        return UserError(
            f"column {clipped(name)!r} of data file {file} has no value in row {row}",
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
        f"column {clipped(name)!r} of data file {file} has {clipped(value, 40)!r} in row {row}, which is not a number",
        hint=hint,
    )


def unreadable(file: Path, failure: Exception) -> UserError:
    """Return the error for a table that cannot be read."""
    return damage.unreadable(
        file,
        failure,
        "check that its content is what its suffix says, in UTF-8; rows of a .csv may have 4 MiB at most",
    )
