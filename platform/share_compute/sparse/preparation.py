"""Reads the files of a job once, checks all rows, and divides them among the workers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from share_compute.errors import Unavailable, UserError
from share_compute.quantities import bytes_text
from share_compute.sparse.blocks import Block, RawRows, block_of, entry_places, joined
from share_compute.sparse.keys import PlaceCounter
from share_compute.sparse.readers.bags import bag_blocks
from share_compute.sparse.readers.libsvm import libsvm_blocks
from share_compute.sparse.readers.prepared import rows_bytes
from share_compute.sparse.readers.ratings import ratings_blocks

DataFormat: TypeAlias = Literal["libsvm", "ratings", "bags"]
TargetKind: TypeAlias = Literal["zero_one", "signs", "numbers", "none"]
"""Targets of a model: classes as 0 and 1, classes as -1 and 1, numbers, or none."""
_MOST_ENTRIES = 1 << 20
"""Approximate maximum number of entries of a prepared file, which is read as a whole."""
MOST_BUFFERED = 1 << 24
"""Entries of all workers together that wait in memory for their files."""
KEPT_FREE_BYTES = 256 << 20
"""Space on the disk that prepared rows leave free, because the server's database may be on it."""
_BLOCK_ROWS = 8192


def blocks_of_file(file: Path, kind: DataFormat, columns: tuple[str, str, str]) -> Iterator[RawRows]:
    """Yield the rows of a file.

    Raises:
        UserError: the file cannot be read, or has a wrong row; the error names file and line.
    """
    match kind:
        case "libsvm":
            return libsvm_blocks(file)
        case "ratings":
            return ratings_blocks(file, columns)
        case "bags":
            return bag_blocks(file)


@dataclass(slots=True)
class Targets:
    """Checks targets, and maps classes to the numbers that the model uses for them.

    Args:
        kind: kind of targets that the model needs.
    """

    kind: TargetKind
    _seen: set[float] = field(default_factory=set)

    def converted(self, rows: RawRows, file: Path) -> RawRows:
        """Return the rows with converted targets.

        Raises:
            UserError: there are targets other than those of two classes.
        """
        if self.kind in ("numbers", "none"):
            return rows
        found = set(np.unique(rows.targets).tolist())
        self._seen |= found if len(found) < 4 else set(sorted(found)[:4])
        if not (self._seen <= {0.0, 1.0} or self._seen <= {-1.0, 1.0}):
            some = ", ".join(f"{value:g}" for value in sorted(self._seen)[:4])
            raise UserError(
                f"data file {file} has targets {some}; the model separates two classes",
                hint="write classes as 0 and 1, or as -1 and 1",
            )
        low = 0.0 if self.kind == "zero_one" else -1.0
        targets = np.where(rows.targets > 0, 1.0, low)
        return RawRows(rows.starts, rows.keys, rows.values, targets, rows.is_second)


@dataclass(frozen=True, slots=True)
class DealtRows:
    """Rows that were divided among workers."""

    files: tuple[tuple[str, ...], ...]
    """Names of the files of each worker."""
    rows: tuple[tuple[int, ...], ...]
    """Rows in each of these files."""
    mean: float
    """Mean target."""
    keys: int
    """Approximate number of different keys in all rows."""
    entries: tuple[int, ...]
    """Entries of the rows of each worker."""

    @property
    def num_rows(self) -> int:
        """Rows of all workers together."""
        return sum(map(sum, self.rows))

    def minibatches(self, worker: int, size: int) -> int:
        """Return the number of minibatches of ``size`` rows of a worker."""
        return -(-sum(self.rows[worker]) // size)


@dataclass(slots=True)
class _Buffer:
    parts: list[RawRows] = field(default_factory=list)
    entries: int = 0
    """Entries and rows that wait for their file."""
    all_entries: int = 0
    names: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


def deal_out(blocks: Iterable[RawRows], workers: int, folder: Path) -> DealtRows:
    """Write the rows of each worker to its own files: row i belongs to worker i modulo ``workers``.

    Args:
        blocks: rows in their order.
        workers: number of workers.
        folder: folder for the files.

    Raises:
        UserError: there are fewer rows than workers.
        Unavailable: the disk is full.
    """
    buffers = [_Buffer() for _ in range(workers)]
    first, total, counter = 0, 0.0, PlaceCounter()
    for block in blocks:
        total += float(block.targets.sum())
        counter.add(entry_places(block))
        for number, buffer in enumerate(buffers):
            part = block.part(slice((number - first) % workers, None, workers))
            buffer.parts.append(part)
            buffer.entries += len(part.keys) + len(part)
            buffer.all_entries += len(part.keys)
            if buffer.entries >= _MOST_ENTRIES:
                _flush(buffer, number, folder)
        if sum(buffer.entries for buffer in buffers) >= MOST_BUFFERED:
            for number, buffer in enumerate(buffers):
                if buffer.entries:
                    _flush(buffer, number, folder)
        first += len(block)
    if first < workers:
        raise UserError(
            f"the data has {first} rows for {workers} workers",
            hint="lower training.workers, or name more files",
        )
    for number, buffer in enumerate(buffers):
        if buffer.entries:
            _flush(buffer, number, folder)
    return DealtRows(
        tuple(tuple(buffer.names) for buffer in buffers),
        tuple(tuple(buffer.rows) for buffer in buffers),
        total / first,
        counter.count,
        tuple(buffer.all_entries for buffer in buffers),
    )


def _flush(buffer: _Buffer, worker: int, folder: Path) -> None:
    rows = joined(buffer.parts)
    name = f"worker-{worker}-{len(buffer.names)}.safetensors"
    content = rows_bytes(rows)
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes - len(content) < KEPT_FREE_BYTES:
        raise Unavailable(
            f"the prepared rows do not fit on the disk of {folder}, which has {bytes_text(free_bytes)} free; "
            f"{bytes_text(KEPT_FREE_BYTES)} stay free for the server",
            hint="free disk space on the server and resume the job, or give fewer rows",
        )
    (folder / name).write_bytes(content)
    buffer.names.append(name)
    buffer.rows.append(len(rows))
    buffer.parts, buffer.entries = [], 0


def read_rows(
    files: Iterable[Path],
    kind: DataFormat,
    columns: tuple[str, str, str],
    targets: Targets,
    watch: Callable[[], None] = lambda: None,
) -> Iterator[RawRows]:
    """Yield the checked rows of files, one after another.

    Args:
        files: files of one format.
        kind: their format.
        columns: columns of user, item and rating.
        targets: conversion of targets.
        watch: called for each block; it may raise an error to end the reading.

    Raises:
        UserError: a file cannot be read, or has a wrong row or target.
    """
    for file in files:
        for block in blocks_of_file(file, kind, columns):
            watch()
            yield targets.converted(block, file)


def measured_blocks(rows: Iterable[RawRows], *, with_bias: bool) -> list[Block]:
    """Return rows as blocks for measurements of a model."""
    make = partial(block_of, with_bias=with_bias)
    return [
        make(block.part(slice(start, start + _BLOCK_ROWS)))
        for block in rows
        for start in range(0, len(block), _BLOCK_ROWS)
    ]
