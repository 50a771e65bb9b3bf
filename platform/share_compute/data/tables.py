"""Makes samples from tables: rows of numbers on disk, which `take` encodes.

Means, deviations, categories and classes are learned from the training split only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from share_compute.data.reading import check_files, files_digest
from share_compute.data.row_file import RowFile, open_rows, require_space, write_files, write_record
from share_compute.data.samples import SPLITS, Array, Split
from share_compute.data.splitting import (
    PreparedRows,
    Rows,
    file_of,
    ordered,
    rows_at,
    shown_classes,
    split_rows,
    unknown_class,
    with_classes,
)
from share_compute.errors import UserError
from share_compute.models.objective import objective_of
from share_compute.quantities import clipped
from share_compute.specification import TableSpec, TrainJob

NAME = "table"
"""Name of the row file."""
MOST_INPUTS = 1 << 16
"""Maximum number of inputs of a sample, after categories are encoded."""
_FORMAT = 1
"""Version of the row file's content, part of every fingerprint. Increase it whenever the content changes."""
_CHUNK_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class Column:
    """Encoding of one column.

    Args:
        name: name of the column.
        categories: categories in the training split, sorted, or the classes of the target; None for numbers.
        mean: number that is encoded as 0.
        scale: difference between two numbers that becomes 1 when encoded.
        fill: value that replaces a missing number: the mean in the training split.
    """

    name: str
    categories: tuple[str, ...] | None = None
    mean: float = 0.0
    scale: float = 1.0
    fill: float = 0.0

    @property
    def width(self) -> int:
        """Number of inputs that encode the column."""
        return 1 if self.categories is None else len(self.categories)


@dataclass(frozen=True, slots=True)
class TableSamples:
    """Rows of tables as samples: features float32 ``[n, inputs]``, and classes int64 or numbers float32 ``[n]``."""

    numbers: NDArray[Any] = field(repr=False)
    """Rows as they were read, float64 ``[rows, columns]``; the target is the last column."""
    rows: Mapping[Split, Rows] = field(repr=False)
    """Indices of the rows of each split."""
    columns: tuple[Column, ...]
    """Encoding of the features."""
    target: Column
    """Encoding of the target."""
    places: Mapping[str, Rows] = field(repr=False)
    """Place of each code among a column's categories, by column; -1 for categories that training lacks."""

    def size(self, split: Split) -> int:
        """Return the number of samples in a split."""
        return len(self.rows[split])

    def take(self, split: Split, indices: Sequence[int] | Rows) -> tuple[Array, Array]:
        """Return inputs float32 ``[n, inputs]`` and targets int64 or float32 ``[n]``; see `Samples.take`."""
        raw = np.asarray(self.numbers[rows_at(self.rows[split], split, indices)])
        inputs = [self._encoded(column, raw[:, place]) for place, column in enumerate(self.columns)]
        target = raw[:, -1]
        if self.target.categories is None:
            targets: Array = ((target - self.target.mean) / self.target.scale).astype(np.float32)
        else:
            targets = self.places[self.target.name][target.astype(np.int64)]
        return np.concatenate(inputs, axis=1), targets

    def _encoded(self, column: Column, raw: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the inputs of one column, ``[n, width]``. A missing or unknown category is 0 everywhere."""
        if column.categories is None:
            scaled = (np.where(np.isnan(raw), column.fill, raw) - column.mean) / column.scale
            return np.asarray(scaled[:, None], dtype=np.float32)
        codes = np.where(np.isnan(raw), len(self.places[column.name]), raw).astype(np.int64)
        places = np.append(self.places[column.name], -1)[codes]
        return np.asarray(places[:, None] == np.arange(column.width), dtype=np.float32)


def prepare_table(spec: TrainJob, folder: Path, progress: Callable[[str, float], None]) -> PreparedRows:
    """Read the tables of a job into one file in ``folder``, split the rows, and learn their encoding.

    A later call with the same tables reuses the file.

    Args:
        spec: a job with ``data.table``.
        folder: folder for the file; created if it does not exist.
        progress: callback that takes the current activity and the share of it that is done, 0 to 1.

    Raises:
        UserError: the tables cannot be used.
        Unavailable: a file in ``folder`` cannot be written.
    """
    data, table = spec.data, spec.data.table
    assert table is not None
    check_files(data.all_files)
    has_classes = spec.resolved_task == "tabular_classification"
    file = _rows_of(data.all_files, table, folder, progress, has_classes=has_classes)
    numbers, facts = file.rows, file.facts
    rows = split_rows(spec, facts["rows"])
    progress("learning scales and categories", 0.0)
    learned = _Learned.of(numbers, rows["train"], facts)
    columns = [learned.column(name, table) for name in facts["features"]]
    width = sum(column.width for column in columns)
    if width > MOST_INPUTS:
        raise UserError(
            f"the columns are encoded as {width} inputs; at most {MOST_INPUTS} are possible",
            hint="leave categorical columns with many categories out of data.table.features",
        )
    target = learned.column(table.target, table)
    places = {name: learned.places(name) for name in facts["categories"]}
    samples = TableSamples(numbers, rows, tuple(columns), target, places)
    notes = [f"each row gives {width} inputs: {_widths(columns)}"]
    if facts["dropped"]:
        notes.append(f"{facts['dropped']} rows without a value in a feature are left out")
    objective = objective_of(spec).model_copy(
        update={"target_mean": target.mean, "target_scale": target.scale}
    )
    if target.categories is not None:
        known = facts["categories"][table.target]
        for split in SPLITS[1:]:
            wrong = np.flatnonzero(_targets(samples, split) < 0)
            if wrong.size:
                row = int(rows[split][wrong[0]])
                source = f"column {clipped(table.target)!r} of data file {file_of(spec, facts['rows'], row)}"
                raise unknown_class(known[int(numbers[row, -1])], split, source)
        counts = np.bincount(_targets(samples, "train"), minlength=target.width)
        objective = with_classes(
            spec, objective, counts, target.categories, f"column {clipped(table.target)!r}"
        )
        notes.append(f"the target has {target.width} classes: {shown_classes(target.categories)}")
    description = {"columns": [asdict(column) for column in columns], "target": asdict(target)}
    return PreparedRows(samples, objective, description, tuple(notes))


def _rows_of(
    files: Sequence[Path],
    table: TableSpec,
    folder: Path,
    progress: Callable[[str, float], None],
    *,
    has_classes: bool,
) -> RowFile:
    """Return the row file of some tables; its metadata holds the number of usable rows of each table."""
    from share_compute.data.table_reading import TableReader, columns_of, count_rows  # noqa: PLC0415 - imports pyarrow

    features = columns_of(files, table)
    reads = [_FORMAT, files[0].suffix, features, table.target, table.categorical, table.missing, has_classes]
    digest = hashlib.sha256(json.dumps([*reads, files_digest(files)]).encode()).hexdigest()
    found = open_rows(folder, NAME, digest)
    if found is not None:
        return found
    row_bytes = 8 * (len(features) + 1)
    require_space(folder, count_rows(files) * row_bytes)
    reader = TableReader(table, features, has_classes)
    shape, counts = write_files(folder, NAME, files, reader.blocks, partial(progress, "reading tables"))
    facts = {
        "features": features,
        "target": table.target,
        "rows": counts,
        "categories": {name: list(codes) for name, codes in reader.categories.items()},
        "dropped": reader.dropped,
    }
    return write_record(folder, NAME, digest, "float64", shape, facts)


@dataclass(frozen=True, slots=True)
class _Learned:
    """Facts about the training rows."""

    names: Mapping[str, int]
    """Place of each column in a row."""
    categories: Mapping[str, Sequence[str]]
    """Categories of all rows by column, in the order of their codes."""
    means: NDArray[np.float64]
    deviations: NDArray[np.float64]
    """Standard deviation of each column; 1 for a column of equal numbers."""
    present: Mapping[str, NDArray[np.bool_]]
    """Whether the training split has each code, by column."""

    @classmethod
    def of(cls, numbers: NDArray[Any], training: Rows, facts: Mapping[str, Any]) -> _Learned:
        names = {name: place for place, name in enumerate((*facts["features"], facts["target"]))}
        categories: Mapping[str, list[str]] = facts["categories"]
        # Rows are read in the order of the file: this is faster, and the sums then do not depend on the seed.
        ordered = np.sort(training)
        present = {name: np.zeros(len(codes), np.bool_) for name, codes in categories.items()}

        def chunks() -> Iterator[NDArray[np.float64]]:
            for start in range(0, len(ordered), _CHUNK_ROWS):
                yield np.asarray(numbers[ordered[start : start + _CHUNK_ROWS]])

        total, count = np.zeros(len(names)), np.zeros(len(names))
        least, most = np.full(len(names), np.inf), np.full(len(names), -np.inf)
        for chunk in chunks():
            total += np.nansum(chunk, axis=0)
            count += (~np.isnan(chunk)).sum(axis=0)
            least = np.fmin(least, np.fmin.reduce(chunk, axis=0))
            most = np.fmax(most, np.fmax.reduce(chunk, axis=0))
            for name, seen in present.items():
                codes = chunk[:, names[name]]
                seen[codes[~np.isnan(codes)].astype(np.int64)] = True
        empty = [name for name, known in zip(names, count, strict=True) if not known]
        if empty:
            raise UserError(
                f"column {clipped(empty[0])!r} has no value in the training split",
                hint="leave it out of data.table.features",
            )
        means = np.where(least == most, least, total / count)
        squares = np.zeros(len(names))
        for chunk in chunks():
            squares += np.nansum((chunk - means) ** 2, axis=0)
        deviations = np.sqrt(squares / count)
        # The mean of equal numbers is rounded, so their deviation may be tiny instead of 0. It must not become a scale.
        rounding = 10 * np.finfo(np.float64).eps * np.abs(means) * np.sqrt(count)
        deviations[(least == most) | (deviations <= rounding)] = 1.0
        return cls(names, categories, means, deviations, present)

    def column(self, name: str, table: TableSpec) -> Column:
        """Return the encoding of a column."""
        if name in self.categories:
            return Column(name, self._kept(name))
        place = self.names[name]
        mean, deviation = float(self.means[place]), float(self.deviations[place])
        if table.scale == "none":
            return Column(name, fill=mean)
        return Column(name, None, mean, deviation, mean)

    def places(self, name: str) -> Rows:
        """Return the place of each code of a column among its categories; -1 for codes that training lacks."""
        order = {category: place for place, category in enumerate(self._kept(name))}
        return np.asarray([order.get(category, -1) for category in self.categories[name]], dtype=np.int64)

    def _kept(self, name: str) -> tuple[str, ...]:
        """Return the categories of a column that the training split has, sorted."""
        known = zip(self.categories[name], self.present[name], strict=True)
        return ordered(category for category, is_present in known if is_present)


def _targets(samples: TableSamples, split: Split) -> Rows:
    found = samples.places[samples.target.name]
    codes = np.asarray(samples.numbers[samples.rows[split], -1])
    return found[codes.astype(np.int64)]


def _widths(columns: Sequence[Column]) -> str:
    parts = [f"{clipped(column.name)} {column.width}" for column in columns if column.categories is not None]
    count = len(columns) - len(parts)
    numbers = [f"{count} number{'s' if count > 1 else ''}"] if count else []
    return ", ".join([*numbers, *parts[:20]])
