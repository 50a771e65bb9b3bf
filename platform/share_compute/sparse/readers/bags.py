"""Reader of bags of words in the format of UCI: three lines with D, W and NNZ, then ``DOCUMENT WORD COUNT`` lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from share_compute.errors import UserError
from share_compute.sparse.blocks import RawRows
from share_compute.sparse.readers.checks import (
    BLOCK_BYTES,
    are_plain,
    key_problem,
    value_problem,
    wrong_line,
)
from share_compute.sparse.readers.libsvm import sorted_rows, text_blocks
from share_compute.sparse.readers.parts import BAG_LINES, WHOLE, FilePart

_HINT = "write three lines with D, W and NNZ, then lines DOCUMENT WORD COUNT, ordered by document"


@dataclass(slots=True)
class BagCounts:
    """Counts of a part of a file, to check all parts together."""

    entries: int = 0
    first: int = -1
    """First document; -1 if there is none."""
    last: int = -1


def bag_blocks(
    file: Path, block_bytes: int = BLOCK_BYTES, part: FilePart = WHOLE, counts: BagCounts | None = None
) -> Iterator[RawRows]:
    """Yield one row for each document, with its words as keys and its counts as values.

    Args:
        file: the file.
        block_bytes: bytes of the file to read at a time.
        part: whole documents of the file. The header is checked only if the part is the whole file.
        counts: receives the counts of the part.

    Raises:
        UserError: the file cannot be read, is cut off, is not ordered by document, or has a wrong number.
    """
    line, header = 1, list[int]()
    found = counts if counts is not None else BagCounts()
    rest = np.empty((3, 0))
    for text in text_blocks(file, block_bytes, part):
        lines = text.splitlines()
        while part.is_whole and lines and len(header) < BAG_LINES:
            header.append(_header(file, line, lines.pop(0)))
            line += 1
        triples = _triples(file, line, lines, part)
        line += len(lines)
        found.entries += triples.shape[1]
        documents = triples[0]
        is_backward = np.diff(documents, prepend=float(found.last)) < 0
        if is_backward.any():
            at = line - len(lines) + int(np.argmax(is_backward)) + part.lines_before(file)
            raise wrong_line(file, at, "its document comes after a later one", _HINT)
        if documents.size:
            found.first = int(documents[0]) if found.first < 0 else found.first
            found.last = int(documents[-1])
            triples = np.concatenate([rest, triples], axis=1)
            is_whole = triples[0] != found.last
            rest = triples[:, ~is_whole]
            yield from _rows(file, triples[:, is_whole])
    if part.is_whole:
        check_entries(file, header, found.entries)
    yield from _rows(file, rest)


def bag_header(file: Path) -> list[int]:
    """Return the numbers in the header of a file: documents, words and entries.

    Raises:
        UserError: the header is wrong.
    """
    lines = next(text_blocks(file, BLOCK_BYTES), b"").splitlines()[:BAG_LINES]
    return [_header(file, number, line) for number, line in enumerate(lines, start=1)]


def check_entries(file: Path, header: Sequence[int], entries: int) -> None:
    """Raise UserError if the number of entries in a file differs from the number in its header."""
    if len(header) < BAG_LINES or entries != header[2]:
        told = header[2] if len(header) == BAG_LINES else "no"
        raise UserError(f"data file {file} has {entries} entries; its header says {told}", hint=_HINT)


def _header(file: Path, line: int, content: bytes) -> int:
    text = content.decode("utf-8", "replace").strip()
    problem = key_problem(text)
    if problem:
        raise wrong_line(file, line, f"the header: {problem}", _HINT)
    return int(text)


def _triples(file: Path, first: int, lines: list[bytes], part: FilePart) -> NDArray[np.float64]:
    """Return documents, words and counts, ``[3, entries]``. Words below 2^53 are exact as float64."""
    fields = [content.split() for content in lines]
    if not fields:
        return np.empty((3, 0))
    triples = _numbers(fields)
    if triples is None:
        raise _first_error(file, first + part.lines_before(file), fields)
    return triples


def _numbers(fields: list[list[bytes]]) -> NDArray[np.float64] | None:
    if any(len(each) != 3 for each in fields):
        return None
    words = np.array(fields, dtype=bytes)
    try:
        ids, counts = words[:, :2].astype(np.uint64), words[:, 2].astype(np.float64)
    except (ValueError, OverflowError):
        return None
    is_negative = any(b"-" in each[0] or b"-" in each[1] for each in fields)
    if is_negative or int(ids.max()) >= 1 << 53 or not are_plain(counts) or (counts <= 0).any():
        return None
    return np.stack([ids[:, 0].astype(np.float64), ids[:, 1].astype(np.float64), counts])


def _first_error(file: Path, first: int, fields: list[list[bytes]]) -> UserError:
    for line, each in enumerate(fields, start=first):
        words = [word.decode("utf-8", "replace") for word in each]
        if len(words) != 3:
            return wrong_line(file, line, f"it has {len(words)} fields, not 3", _HINT)
        problem = key_problem(words[0]) or key_problem(words[1]) or value_problem(words[2])
        if problem is None and float(words[2]) <= 0:
            problem = f"count {words[2][:40]} is not positive"
        if problem is None and max(int(words[0]), int(words[1])) >= 1 << 53:
            problem = "a number of a document or word is not below 2^53"
        if problem:
            return wrong_line(file, line, problem, _HINT)
    return UserError(f"data file {file} cannot be read as a bag of words", hint=_HINT)


def _rows(file: Path, triples: NDArray[np.float64]) -> Iterator[RawRows]:
    if not triples.size:
        return
    ends = np.flatnonzero(np.diff(triples[0])) + 1
    starts = np.concatenate([[0], ends, [triples.shape[1]]]).astype(np.int64)
    zeros = np.zeros(len(starts) - 1)
    rows = sorted_rows(RawRows(starts, triples[1].astype(np.uint64), triples[2], zeros))
    if rows is None:
        for start, stop in pairwise(starts.tolist()):
            words, counts = np.unique(triples[1, start:stop], return_counts=True)
            if (counts > 1).any():
                document, word = int(triples[0, start]), int(words[counts > 1][0])
                raise UserError(f"data file {file}: document {document} has word {word} twice", hint=_HINT)
    else:
        yield rows
