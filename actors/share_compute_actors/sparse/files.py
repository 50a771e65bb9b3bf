"""Data files of sparse models: an actor on the submitter's machine serves ranges of bytes to workers elsewhere."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ray
import xxhash

from share_compute.errors import LinkLost, UserError
from share_compute.files.plain_files import open_unlinked
from share_compute.sparse.readers.bags import bag_header, check_entries
from share_compute.sparse.readers.parts import TRIPLES_SUFFIX, FilePart, Format, PartOfFile, split_files
from share_compute.sparse.readers.ratings import write_triples
from share_compute_actors.group.answering import answers
from share_compute_actors.sparse.messages import BagPart
from share_compute_actors.unpickling import refuse_pickles
from share_compute_actors.wire import Content, Natural, Schema, WithContent, unpack_answer

PIECE_BYTES = 4 << 20
"""Bytes in one call, so that Ray sends them inline."""
_TRIES = 3


class DataPart(NamedTuple):
    """Rows of a file that a worker reads."""

    file: Natural
    """Index of the file."""
    path: str
    start: Natural
    stop: Natural
    header: Natural


class DataShares(NamedTuple):
    """Parts of each worker."""

    parts: tuple[tuple[DataPart, ...], ...]
    entries: tuple[Natural, ...] = ()
    """Number of entries that the header of each file says, for bags of words."""


SHARES: Schema[DataShares] = Schema(DataShares)
PARTS: Schema[tuple[DataPart, ...]] = Schema(tuple[DataPart, ...])
PIECE = WithContent(Schema(str))
"""Bytes after their XXH3-64."""


def check_bags(shares: DataShares, bags: Sequence[BagPart]) -> None:
    """Check that the parts of each bag of words add up to the numbers in its header.

    Args:
        shares: parts of each worker.
        bags: counts of the parts that workers read, in the order of the parts.

    Raises:
        UserError: the numbers differ.
    """
    paths = {each.file: each.path for parts in shares.parts for each in parts}
    for file, wanted in enumerate(shares.entries):
        parts = [bag for bag in bags if bag.file == file]
        name = Path(paths.get(file, ""))
        check_entries(name, (0, 0, wanted), sum(each.entries for each in parts))
        for before, after in pairwise([each for each in parts if each.first >= 0]):
            if after.first <= before.last:
                raise UserError(
                    f"data file {name}: document {after.first} comes after document {before.last}",
                    hint="order the file by document",
                )


@ray.remote(num_cpus=0, concurrency_groups={"serve": 8})
class SparseFiles:
    """Cuts data files into parts, and serves their bytes."""

    def __init__(self) -> None:
        refuse_pickles()
        self._scratch = tempfile.TemporaryDirectory(prefix="share-compute-sparse-")
        self._opened: list[tuple[BinaryIO, tuple[int, int]]] = []
        """Files, with size and time of the last change when they were opened."""

    @answers(SHARES)
    def share(
        self, files: Sequence[Sequence[str]], kind: Format, workers: int, columns: Sequence[str]
    ) -> DataShares:
        """Open files, and return the parts of each worker.

        Args:
            files: paths of the files of each worker, or one list that is divided among all workers.
            kind: format of the files.
            workers: number of workers.
            columns: columns of user, item and rating.

        Raises:
            UserError: a file cannot be read, or there are too few rows.
        """
        paths: list[Path] = []
        shares: list[list[DataPart]] = []
        for lists in files:
            group = [self._readable(Path(file), kind, columns) for file in lists]
            before = len(self._opened) + len(paths)
            paths += group
            split = split_files(group, kind, workers if len(files) == 1 else 1)
            shares += [[_data_part(group, before, each) for each in parts] for parts in split]
        if len(shares) != workers:
            raise UserError(
                f"there are {len(shares)} lists of files for {workers} workers",
                hint="give one list of files, or one for each worker",
            )
        for path in paths:
            source = open_unlinked(path)
            self._opened.append((source, _identity(source)))
        entries = [bag_header(path)[2] for path in paths] if kind == "bags" else []
        return DataShares(tuple(map(tuple, shares)), tuple(entries))

    def _readable(self, file: Path, kind: Format, columns: Sequence[str]) -> Path:
        """Return the file, or for .parquet a copy of its ratings that can be cut anywhere."""
        if kind != "ratings" or file.suffix != ".parquet":
            return file
        target = Path(self._scratch.name) / f"{len(list(Path(self._scratch.name).iterdir()))}{TRIPLES_SUFFIX}"
        user, item, rating = columns
        write_triples(file, (user, item, rating), target)
        return target

    @ray.method(concurrency_group="serve")
    @answers(PIECE)
    def read(self, file: int, offset: int, size: int) -> Content:
        """Return bytes of a file.

        Raises:
            UserError: the file was changed since it was opened.
        """
        source, identity = self._opened[file]
        content = os.pread(source.fileno(), min(size, PIECE_BYTES), offset)
        if _identity(source) != identity:
            raise UserError(
                f"data file {source.name} was changed while it was read", hint="submit the job again"
            )
        return Content(xxhash.xxh3_64_hexdigest(content), content)


def _data_part(group: Sequence[Path], before: int, part: PartOfFile) -> DataPart:
    return DataPart(before + part.file, str(group[part.file]), part.start, part.stop, part.header)


def _identity(source: BinaryIO) -> tuple[int, int]:
    status = os.fstat(source.fileno())
    return status.st_size, status.st_mtime_ns


class RemoteFile(io.RawIOBase):
    """A file on the submitter's machine, with the interface of a local file.

    The next piece is requested while the current one is in use.

    Args:
        store: a handle of `SparseFiles`.
        file: index of the file.
    """

    def __init__(self, store: Any, file: int) -> None:
        self._store, self._file = store, file
        self._at = 0
        self._asked: tuple[int, Any] | None = None
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in the file."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position, relative to the beginning or to the present position."""
        if whence == io.SEEK_END:
            raise io.UnsupportedOperation("the size of the file is not known here")
        self._at = offset + (self._at if whence == io.SEEK_CUR else 0)
        self._rest = memoryview(b"")
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read some of the following bytes; return their number."""
        if not self._rest:
            self._rest = memoryview(self._piece())
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        self._at += count
        return count

    def _piece(self) -> bytes:
        for _ in range(_TRIES):
            if self._asked is None or self._asked[0] != self._at:
                self._asked = (self._at, self._ask(self._at))
            answer = unpack_answer(PIECE, ray.get(self._asked[1]), "the server of the data files")
            self._asked = None
            if xxhash.xxh3_64_hexdigest(answer.content) == answer.header:
                content = bytes(answer.content)
                if content:
                    self._asked = (self._at + len(content), self._ask(self._at + len(content)))
                return content
        raise LinkLost("a piece of a data file arrived damaged", hint="check the network of this machine")

    def _ask(self, offset: int) -> Any:
        return self._store.read.remote(self._file, offset, PIECE_BYTES)


def remote_part(store: Any, part: DataPart) -> FilePart:
    """Return a part of a file in the form that readers take."""

    def opened(_: Path) -> BinaryIO:
        return io.BufferedReader(RemoteFile(store, part.file), 1 << 16)

    return FilePart(part.start, part.stop, part.header, opened)
