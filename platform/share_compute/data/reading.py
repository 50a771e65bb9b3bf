"""Reads text piece by piece from .txt, .jsonl and .parquet files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from share_compute.errors import UserError
from share_compute.files.damage import damage_of, unreadable
from share_compute.files.plain_files import open_unlinked
from share_compute.files.strict import nearest
from share_compute.quantities import bytes_text

PIECE_CHARACTERS = 1 << 16
"""Maximum length of a piece in characters. Longer text is cut, where possible at a line break or a space."""
_ROWS = 1_000
_MOST_LINE_BYTES = 64 << 20
_MOST_TEXT_LINE_BYTES = 512 << 20
"""Maximum length of a line of a .txt file, in bytes. The text8 corpus, for example, is one line of 100 MB."""
_SCANNED_BYTES = 4 << 20
_BATCH_CHARACTERS = 1 << 20
"""Characters of a file after which a batch of lines ends."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A part of the text of one document."""

    text: str
    ends_document: bool
    read: float
    """Estimated share of all text that has been read up to the end of this piece, 0 to 1."""
    file: int = 0
    """Place of its file among all files, from 0."""


def check_files(files: Sequence[Path]) -> None:
    """Raise UserError, naming the file, unless each file exists, can be opened and is not empty."""
    for file in files:
        if not file.is_file():
            what = "is not a file" if file.exists() else "does not exist on the server"
            raise UserError(
                f"data file {file} {what}", hint="give the path of a file that the server can read"
            )
        try:
            with open_unlinked(file) as opened:
                empty = not opened.read(1)
        except OSError as failure:
            raise UserError(
                f"data file {file} cannot be read: {failure.strerror}", hint="let the server read it"
            ) from failure
        if empty:
            raise UserError(f"data file {file} is empty", hint="take it out of data.files, or fill it")


def files_digest(files: Sequence[Path]) -> str:
    """Return a hexadecimal SHA-256 digest that depends on the contents of the files and on their order.

    Raises:
        UserError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in files:
        try:
            with open_unlinked(file) as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
        except OSError as failure:
            raise _unreadable(file, failure) from failure
    return digest.hexdigest()


def read_pieces(files: Sequence[Path], column: str) -> Iterator[TextPiece]:
    """Yield the text of all files in order, cut into pieces.

    A .txt file is one document, and so is each row of a .jsonl or .parquet file. Rows without text are left out.

    Args:
        files: files with the same suffix, checked by `check_files`.
        column: column with the text, in .jsonl and .parquet files.

    Raises:
        UserError: a file cannot be read, is malformed, has a part that is too large, or lacks the column of text.
    """
    expected = [_text_bytes(file) for file in files]
    total, before = sum(expected), 0
    for place, (file, size) in enumerate(zip(files, expected, strict=True)):
        done = 0
        for text, ends_document in _cut_documents(_read_rows(file, column), whole=file.suffix == ".txt"):
            try:
                done += len(text.encode())
            except UnicodeEncodeError as failure:  # JSON can encode half of a surrogate pair.
                raise _unreadable(file, failure) from failure
            yield TextPiece(text, ends_document, (before + min(done, size)) / total, place)
        before += size


def _text_bytes(file: Path) -> int:
    """Estimate the size of a file's text in bytes."""
    if file.suffix != ".parquet":
        try:
            return file.stat().st_size
        except OSError as failure:
            raise _unreadable(file, failure) from failure
    from pyarrow import ArrowException, parquet  # noqa: PLC0415 - heavy

    try:
        with open_unlinked(file) as opened:
            metadata = parquet.read_metadata(opened)
    except (ValueError, OSError, ArrowException) as failure:
        raise _unreadable(file, failure) from failure
    sizes = (metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups))
    return max(1, int(sum(sizes)))


def _read_rows(file: Path, column: str) -> Iterator[list[str]]:
    """Yield lists of texts, one text per row. The rows of a .txt file are its lines, with their line breaks."""
    if file.suffix == ".parquet":
        yield from _read_column(file, column)
        return
    require_short_lines(file)
    lines = _read_lines(file)
    yield from lines if file.suffix == ".txt" else _parse_lines(file, column, lines)


def _read_column(file: Path, column: str) -> Iterator[list[str]]:
    from pyarrow import ArrowException, parquet  # noqa: PLC0415 - heavy

    from share_compute.data.parquet_rows import record_batches  # noqa: PLC0415 - imports pyarrow

    try:
        with open_unlinked(file) as opened:
            names = parquet.read_schema(opened).names
        if column not in names:
            raise _no_column(file, column, names)
        for batch in record_batches(file, [column]):
            yield [_as_text(file, column, value) for value in batch.column(0).to_pylist()]
    except (ValueError, OSError, ArrowException) as failure:
        raise _unreadable(file, failure) from failure


def require_short_lines(file: Path) -> None:
    """Raise UserError if a line is too long to be held in memory, or if the file cannot be read."""
    most = _MOST_LINE_BYTES if file.suffix == ".jsonl" else _MOST_TEXT_LINE_BYTES
    since_break = 0
    try:
        with open_unlinked(file) as opened:
            while piece := opened.read(_SCANNED_BYTES):
                first, last = piece.find(b"\n"), piece.rfind(b"\n")
                if max(since_break + (first if first >= 0 else len(piece)), 0) > most:
                    raise UserError(
                        f"data file {file} has a line of more than {bytes_text(most)}",
                        hint="break it into lines; a .jsonl file has one JSON object on each",
                    )
                since_break = since_break + len(piece) if last < 0 else len(piece) - last - 1
    except OSError as failure:
        raise _unreadable(file, failure) from failure


def _read_lines(file: Path) -> Iterator[list[str]]:
    """Yield lists of up to `_ROWS` lines, or fewer long ones; each line break is one line feed."""
    try:
        with open_unlinked(file) as opened, TextIOWrapper(opened, encoding="utf-8-sig") as text:
            lines, characters = list[str](), 0
            for line in text:
                lines.append(line)
                characters += len(line)
                if len(lines) == _ROWS or characters >= _BATCH_CHARACTERS:
                    yield lines
                    lines, characters = [], 0
            if lines:
                yield lines
    except (ValueError, OSError) as failure:
        raise _unreadable(file, failure) from failure


def _parse_lines(file: Path, column: str, batches: Iterator[list[str]]) -> Iterator[list[str]]:
    number, columns_known = 0, False
    for lines in batches:
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(lines, start=number + 1):  # noqa: B020 - continues counting
            if line.strip():
                rows.append(parse_line(file, number, line))
        if rows and not columns_known:
            columns = sorted(set().union(*rows))
            if column not in columns:
                raise _no_column(file, column, columns)
            columns_known = True
        yield [_as_text(file, column, row.get(column)) for row in rows]


def parse_line(file: Path, number: int, line: str) -> dict[str, Any]:
    """Return the JSON object on a line of a .jsonl file.

    Args:
        file: the file, for errors.
        number: number of the line, from 1.
        line: the line.

    Raises:
        UserError: the line is not a JSON object.
    """
    hint = 'put one JSON object on each line, such as {"text": "..."}'
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as failure:
        raise UserError(
            f"line {number} of data file {file} is not JSON: {damage_of(file, failure)}", hint=hint
        ) from failure
    if not isinstance(row, dict):
        raise UserError(f"line {number} of data file {file} is not a JSON object", hint=hint)
    return row


def _as_text(file: Path, column: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(
            f"column {column!r} of {file} holds {type(value).__name__}, not text",
            hint="name a column of strings in data.text_column",
        )
    return value


def _cut_documents(batches: Iterator[list[str]], *, whole: bool) -> Iterator[tuple[str, bool]]:
    """Yield (piece, whether it ends its document).

    All rows are one document if ``whole``; otherwise each row is one.
    """
    if not whole:
        for rows in batches:
            for row in filter(None, rows):
                *begun, last = _cut(row)
                yield from ((piece, False) for piece in begun)
                yield last, True
        return
    rest = ""
    for lines in batches:
        *ready, rest = _cut(rest + "".join(lines))
        yield from ((piece, False) for piece in ready)
    yield rest, True


def _cut(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        limit = start + PIECE_CHARACTERS
        # Cut before a space, since many tokenizers join it to the next word.
        stop = text.rfind("\n", start, limit) + 1
        if stop <= start:
            stop = text.rfind(" ", start + 1, limit)
        if stop <= start:
            stop = limit
        yield text[start:stop]
        start = stop
    yield text[start:]


def _no_column(file: Path, column: str, columns: list[str]) -> UserError:
    guess = nearest(column, columns)
    hint = f"; did you mean {guess!r}?" if guess else ""
    return UserError(
        f"{file} has no column {column!r}{hint}",
        hint=f"set data.text_column to one of {', '.join(columns)}",
        details={"columns": columns},
    )


def _unreadable(file: Path, failure: Exception) -> UserError:
    hint = "check that its content is what its suffix says"
    if isinstance(failure, UnicodeError):
        hint = "convert it to UTF-8, e.g. with iconv"
    return unreadable(file, failure, hint)
