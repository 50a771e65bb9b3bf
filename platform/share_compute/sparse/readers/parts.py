"""Parts of data files: files are cut between rows, so that each worker reads only its part."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from share_compute.errors import UserError
from share_compute.files.damage import damage_of
from share_compute.files.plain_files import open_unlinked
from share_compute.sparse.readers.checks import BLOCK_BYTES, wrong_line

Format = Literal["libsvm", "ratings", "bags"]
BAG_LINES = 3
"""Lines of the header of a bag of words."""
TRIPLE = np.dtype([("user", "<u8"), ("item", "<u8"), ("rating", "<f8")])
"""Record of one rating in a file of ratings that was written by `write_triples`."""
TRIPLES_SUFFIX = ".triples"
_QUOTE = b'"'


@dataclass(frozen=True, slots=True)
class FilePart:
    """Rows of a file, and how a reader opens the file."""

    start: int = 0
    """Byte with which the first row begins."""
    stop: int | None = None
    """Byte after the last row; None for the end of the file."""
    header: int = 0
    """Bytes before the first row of the file."""
    opened: Callable[[Path], BinaryIO] = field(default=open_unlinked, compare=False)
    """Opens the file, which may be on another machine."""

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole file, with its header."""
        return not self.start and self.stop is None

    def lines_before(self, file: Path) -> int:
        """Return the number of lines before the part, by reading the file up to the part."""
        if not self.start:
            return 0
        with self.opened(file) as source:
            return sum(block.count(b"\n") for block in _blocks(source, self.start))

    def blocks(self, file: Path, block_bytes: int) -> Iterator[bytes]:
        """Yield the bytes of the part."""
        with self.opened(file) as source:
            source.seek(self.start)
            yield from _blocks(source, None if self.stop is None else self.stop - self.start, block_bytes)

    def stream(self, file: Path, block_bytes: int) -> BinaryIO:
        """Return the header and the bytes of the part as one stream."""
        return io.BufferedReader(_Joined(self._with_header(file, block_bytes)), block_bytes)

    def _with_header(self, file: Path, block_bytes: int) -> Iterator[bytes]:
        if self.start:
            with self.opened(file) as source:
                yield source.read(self.header)
        yield from self.blocks(file, block_bytes)


WHOLE = FilePart()


class _Joined(io.RawIOBase):
    """Bytes that an iterator yields, as a stream."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts, self._rest = parts, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._rest:
            part = next(self._parts, None)
            if part is None:
                return 0
            self._rest = memoryview(part)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _blocks(source: BinaryIO, size: int | None, block_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
    """Yield the next ``size`` bytes in blocks; None means all remaining bytes."""
    while content := source.read(block_bytes if size is None else min(block_bytes, size)):
        yield content
        if size is not None:
            size -= len(content)


@dataclass(frozen=True, slots=True)
class PartOfFile:
    """Rows of one of several files."""

    file: int
    """Index of the file."""
    start: int
    stop: int
    header: int


def split_files(files: Sequence[Path], kind: Format, workers: int) -> list[list[PartOfFile]]:
    """Return the parts of each worker; all parts have about the same number of bytes, and together they hold all rows.

    Files are cut where a line begins; bags of words are cut where a document begins.

    Raises:
        UserError: a file cannot be read, has a row that is too long, or there are fewer rows than workers.
    """
    spans = [_span(file, kind) for file in files]
    total = sum(stop - start for start, stop in spans)
    cuts = [_cut(files, spans, kind, total * number // workers) for number in range(1, workers)]
    ends = [(0, spans[0][0]), *cuts, (len(files) - 1, spans[-1][1])]
    result: list[list[PartOfFile]] = []
    for (first, start), (last, stop) in pairwise(ends):
        parts = []
        for number in range(first, last + 1):
            begin = start if number == first else spans[number][0]
            end = stop if number == last else spans[number][1]
            if begin < end:
                parts.append(PartOfFile(number, begin, end, spans[number][0]))
        if not parts:
            raise UserError(
                f"the data files have too few rows for {workers} workers", hint="use fewer workers"
            )
        result.append(parts)
    return result


def _span(file: Path, kind: Format) -> tuple[int, int]:
    """Return the first and the last byte offset of the rows of a file."""
    try:
        with open_unlinked(file) as source:
            if kind == "ratings" and file.suffix == ".csv":
                _skip_record(source, file)
            for _ in range(BAG_LINES if kind == "bags" else 0):
                _line(source, file)
            start = source.tell()
            return start, max(start, source.seek(0, io.SEEK_END))
    except OSError as failure:
        raise UserError(
            f"data file {file} cannot be read: {damage_of(file, failure)}", hint="check its path"
        ) from failure


def _cut(
    files: Sequence[Path], spans: Sequence[tuple[int, int]], kind: Format, wanted: int
) -> tuple[int, int]:
    """Return (file, byte offset) of the first row at or after a given number of bytes of all rows."""
    for number, (start, stop) in enumerate(spans):
        if wanted < stop - start:
            return number, min(stop, _row_start(files[number], kind, start, start + wanted))
        wanted -= stop - start
    return len(spans) - 1, spans[-1][1]


def _row_start(file: Path, kind: Format, first: int, at: int) -> int:
    """Return the offset of the first row that begins at or after a byte."""
    if at <= first:
        return first
    if file.suffix == TRIPLES_SUFFIX:
        return -(-at // TRIPLE.itemsize) * TRIPLE.itemsize
    with open_unlinked(file) as source:
        if kind == "ratings":
            # A line feed inside quotes does not end a row, so the quotes before it are counted.
            quotes = sum(block.count(_QUOTE) for block in _blocks(source, at - 1))
            _skip_record(source, file, quotes)
        else:
            source.seek(at - 1)
            _line(source, file)
        if kind == "bags":
            document = None
            while line := _line(source, file):
                words = line.split(maxsplit=1)
                if document is not None and words and words[0] != document:
                    return source.tell() - len(line)
                document = words[0] if words else document
        return source.tell()


def _skip_record(source: BinaryIO, file: Path, quotes: int = 0) -> None:
    """Read up to the next line feed outside of quotes."""
    while line := _line(source, file):
        quotes += line.count(_QUOTE)
        if quotes % 2 == 0:
            return


def _line(source: BinaryIO, file: Path) -> bytes:
    line = source.readline(BLOCK_BYTES + 1)
    if len(line) > BLOCK_BYTES:
        before = source.tell() - len(line)
        number = FilePart(start=before).lines_before(file) + 1
        raise wrong_line(file, number, f"it is longer than {BLOCK_BYTES} bytes", "split the row")
    return line
