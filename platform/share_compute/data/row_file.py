"""Writes and opens row files: equal-sized rows of numbers on disk, with a record of their metadata."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from share_compute.data.tokens import writing
from share_compute.errors import Unavailable
from share_compute.quantities import bytes_text


@dataclass(frozen=True, slots=True)
class RowFile:
    """A complete row file.

    Args:
        rows: the rows as a read-only memory map, ``[rows, ...]``.
        facts: the metadata, as JSON.
    """

    rows: NDArray[Any]
    facts: dict[str, Any]


def open_rows(folder: Path, name: str, fingerprint: str) -> RowFile | None:
    """Return the complete row file of this name and fingerprint; None if there is none."""
    try:
        record = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        if record["fingerprint"] != fingerprint:
            return None
        rows = np.memmap(folder / f"{name}.bin", record["dtype"], "r", shape=tuple(record["shape"]))
        is_whole = rows.nbytes == (folder / f"{name}.bin").stat().st_size
        return RowFile(rows, record["facts"]) if is_whole else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def require_space(folder: Path, size_bytes: int) -> None:
    """Raise Unavailable unless the disk of a folder has enough space; create the folder if it does not exist."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(folder).free
    if size_bytes > free_bytes:
        raise Unavailable(
            f"the prepared data needs {bytes_text(size_bytes)}, but the disk of {folder} has {bytes_text(free_bytes)}",
            hint="give fewer samples, or free disk space on the server and resume the job",
        )


def write_rows(folder: Path, name: str, blocks: Iterable[NDArray[Any]]) -> tuple[int, ...]:
    """Write blocks ``[rows, ...]`` of one dtype one after the other; return the shape of all rows.

    The file becomes usable with `write_record`.

    Raises:
        Unavailable: the file cannot be written; the incomplete file is removed.
    """
    part = folder / f"{name}.bin.part"
    count, rest = 0, tuple[int, ...]()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").unlink(missing_ok=True)
        try:
            with part.open("wb") as file:
                for block in blocks:
                    file.write(np.ascontiguousarray(block).data)
                    count, rest = count + len(block), block.shape[1:]
            part.replace(folder / f"{name}.bin")
        finally:
            part.unlink(missing_ok=True)
    return (count, *rest)


def write_files(
    folder: Path,
    name: str,
    files: Sequence[Path],
    blocks_of: Callable[[Path], Iterable[NDArray[Any]]],
    progress: Callable[[float], None],
) -> tuple[tuple[int, ...], list[int]]:
    """Write the rows of some files as `write_rows` does.

    Args:
        folder: folder of the row file.
        name: name of the row file.
        files: the files, in order.
        blocks_of: yields the rows of a file in blocks ``[rows, ...]``.
        progress: called with the share of files that are written, 0 to 1.

    Returns:
        shape of all rows, and number of rows of each file.

    Raises:
        Unavailable: the disk is too full, or the row file cannot be written.
    """
    counts = [0] * len(files)

    def blocks() -> Iterator[NDArray[Any]]:
        for place, file in enumerate(files):
            progress(place / len(files))
            for block in blocks_of(file):
                counts[place] += len(block)
                require_space(folder, block.nbytes)
                yield block

    return write_rows(folder, name, blocks()), counts


def write_record(
    folder: Path, name: str, fingerprint: str, dtype: str, shape: tuple[int, ...], facts: dict[str, Any]
) -> RowFile:
    """Write the metadata of a row file, which marks it as complete; return the row file."""
    record = {"fingerprint": fingerprint, "dtype": dtype, "shape": shape, "facts": facts}
    with writing(folder):
        part = folder / f"{name}.json.part"
        part.write_text(json.dumps(record), encoding="utf-8")
        part.replace(folder / f"{name}.json")
    opened = open_rows(folder, name, fingerprint)
    assert opened is not None, "the row file was written just now"
    return opened
