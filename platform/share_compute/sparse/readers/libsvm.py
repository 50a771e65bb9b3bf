"""Reader of the libsvm format: a line ``TARGET KEY:VALUE KEY:VALUE ...`` for each row, with comments after ``#``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from share_compute.errors import UserError
from share_compute.files.damage import damage_of
from share_compute.sparse.blocks import RawRows
from share_compute.sparse.keys import KEY_LIMIT
from share_compute.sparse.readers.checks import (
    BLOCK_BYTES,
    are_plain,
    key_problem,
    value_problem,
    wrong_line,
)
from share_compute.sparse.readers.parts import WHOLE, FilePart

_COMMENT = re.compile(rb"#[^\n]*")
_SPACE, _COLON, _NEWLINE = 32, 58, 10
_HINT = "write each row as TARGET KEY:VALUE KEY:VALUE, with keys from 0 to 2^63 - 1"
_DELIMITERS = bytes.maketrans(b":\n\t\r\v\f", b"      ")


def libsvm_blocks(file: Path, block_bytes: int = BLOCK_BYTES, part: FilePart = WHOLE) -> Iterator[RawRows]:
    """Yield the rows of a file, or of a part of it. Entries of a row are sorted by key.

    Raises:
        UserError: the file cannot be read, or a line has a wrong key or value, or a duplicate key.
    """
    before = 0
    for text in text_blocks(file, block_bytes, part):
        plain = _COMMENT.sub(b"", text) if b"#" in text else text
        rows = _parsed(plain)
        if rows is None:
            raise _first_error(file, plain, before + part.lines_before(file))
        before += text.count(b"\n")
        if len(rows):
            yield rows


def text_blocks(file: Path, block_bytes: int, part: FilePart = WHOLE) -> Iterator[bytes]:
    """Yield a part of a file in blocks of whole lines, each of which ends with a line feed.

    Raises:
        UserError: the file cannot be read, or a line is longer than a block.
    """
    rest, lines = b"", 0
    try:
        for content in part.blocks(file, block_bytes):
            whole, found, after = content.rpartition(b"\n")
            if found:
                yield rest + whole + found
                lines += content.count(b"\n")
                rest = after
            else:
                rest += content
            if len(rest) > block_bytes:
                line = lines + 1 + part.lines_before(file)
                raise wrong_line(file, line, f"it is longer than {block_bytes} bytes", "split the row")
    except OSError as failure:
        raise UserError(
            f"data file {file} cannot be read: {damage_of(file, failure)}", hint="check its path"
        ) from failure
    if rest:
        yield rest + b"\n"


def _parsed(text: bytes) -> RawRows | None:
    """Return the rows of whole lines, or None if there is an error in them."""
    array = np.frombuffer(text, np.uint8)
    is_space = (array == _SPACE) | ((array >= 9) & (array <= 13))
    is_start = ~is_space & np.concatenate([[True], is_space[:-1]])
    newlines = np.flatnonzero(array == _NEWLINE)
    colons = np.flatnonzero(array == _COLON)
    at = np.flatnonzero(is_start)
    tokens = np.diff(np.searchsorted(at, np.append(-1, newlines)))
    counts = np.diff(np.searchsorted(colons, np.append(-1, newlines)))
    # Each non-empty line has one token more than colons, and each colon is inside a token.
    is_row = tokens > 0
    has_bad_colon = len(colons) and (
        colons[0] == 0
        or is_space[colons - 1].any()
        or is_space[colons + 1].any()
        or (np.diff(colons) == 1).any()
    )
    if has_bad_colon or (tokens[is_row] != counts[is_row] + 1).any() or counts[~is_row].any():
        return None
    # The first token of a row is its target, which has no colon; each later token has one colon.
    firsts = np.cumsum(tokens[is_row]) - tokens[is_row]
    starts_of, ends_of = np.delete(at, firsts), np.delete(np.append(at[1:], len(array)), firsts)
    counts = counts[is_row]
    num_rows, num_entries = len(counts), int(counts.sum())
    words = pa.array([text.translate(_DELIMITERS).decode("latin-1")])
    flat = pc.list_flatten(pc.ascii_split_whitespace(pc.ascii_trim_whitespace(words)))
    if num_rows == 0:
        empty = np.empty(0)
        return RawRows(np.zeros(1, np.int64), np.empty(0, np.uint64), empty, empty)
    if len(flat) != num_rows + 2 * num_entries or (colons < starts_of).any() or (colons > ends_of).any():
        return None
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    at_target = np.arange(num_rows) + 2 * starts[:-1]
    at_key = np.arange(num_entries) * 2 + np.repeat(np.arange(num_rows), counts) + 1
    try:
        targets = _floats(flat.take(pa.array(at_target)))
        keys: NDArray[np.uint64] = flat.take(pa.array(at_key)).cast(pa.uint64()).to_numpy()
        values = _floats(flat.take(pa.array(at_key + 1)))
    except pa.ArrowInvalid:
        return None
    if (keys >= KEY_LIMIT).any() or not are_plain(values) or not are_plain(targets):
        return None
    return sorted_rows(RawRows(starts, keys, values, targets))


def _floats(words: pa.Array) -> NDArray[np.float64]:
    unsigned = pc.replace_substring_regex(words, r"^\+([0-9.])", r"\1")  # pyarrow reads no plus sign
    numbers: NDArray[np.float64] = unsigned.cast(pa.float64()).to_numpy()
    return numbers


def sorted_rows(rows: RawRows) -> RawRows | None:
    """Return rows whose entries are in the order of keys, or None if a row has a duplicate key."""
    number = np.repeat(np.arange(len(rows)), np.diff(rows.starts))
    is_same = number[1:] == number[:-1]
    if (rows.keys[1:] < rows.keys[:-1])[is_same].any():
        order = np.lexsort((rows.keys, number))
        rows = RawRows(rows.starts, rows.keys[order], rows.values[order], rows.targets)
    return None if (rows.keys[1:] == rows.keys[:-1])[is_same].any() else rows


def _first_error(file: Path, text: bytes, before: int) -> UserError:
    """Return the error of the first wrong line. This is slow, but it runs only once."""
    for line, content in enumerate(text.split(b"\n"), start=before + 1):
        words = content.decode("utf-8", "replace").split()
        if not words:
            continue
        problem = value_problem(words[0])
        if problem:
            return wrong_line(file, line, f"the target: {problem}", _HINT)
        keys = set[int]()
        for word in words[1:]:
            key, colon, value = word.partition(":")
            problem = (
                (None if colon else f"{word[:40]!r} has no colon")
                or ("qid is not read" if key == "qid" else None)
                or key_problem(key)
                or value_problem(value)
            )
            if problem is None and int(key) in keys:
                problem = f"key {key} occurs twice"
            if problem:
                return wrong_line(file, line, problem, _HINT)
            keys.add(int(key))
    return UserError(f"data file {file} cannot be read as libsvm after line {before}", hint=_HINT)
