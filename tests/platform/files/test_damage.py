"""Reasons for which files cannot be read: our own sentences, whatever the libraries say."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pyarrow as pa
import pytest

from share_compute.errors import UserError
from share_compute.files.damage import damage_of, unreadable
from share_compute.sparse.readers.ratings import ratings_blocks

FILE = Path("/data/rows.csv")


def json_error(text: str) -> Exception:
    with pytest.raises((ValueError, RecursionError)) as caught:
        json.loads(text)
    return caught.value


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (
            pa.ArrowInvalid("CSV parse error: Row #3: Expected 2 columns, got 1: x"),
            "row 2 has 1 cell, and the header has 2",
        ),
        (pa.ArrowInvalid("straddling object straddles two block boundaries"), "a row is longer than 4 MiB"),
        (pa.ArrowInvalid("CSV conversion error to string: invalid UTF8 data"), "it is not UTF-8 text"),
        (pa.ArrowInvalid("Empty CSV file"), "it is empty"),
        (pa.ArrowNotImplementedError("bits"), "it has a type that is not read"),
        (pa.ArrowMemoryError("malloc of size 64 failed"), "memory was lacking while it was read"),
        (OSError("Couldn't deserialize thrift: std::bad_alloc"), "memory was lacking while it was read"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory was lacking while it was read"),
        (pa.ArrowInvalid("invalid value 'out of memory'"), "it is no .csv file, or it is damaged"),
        (pa.ArrowInvalid("in pyarrow's own words"), "it is no .csv file, or it is damaged"),
        (OSError("Couldn't deserialize thrift"), "it is no .csv file, or it is damaged"),
        (OSError(errno.EACCES, "Permission denied"), "Permission denied"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "it is not UTF-8 text"),
        (json_error('{"a": }'), "the error is at character 7"),
        (json_error("[" * 100_000), "its brackets are nested too deeply"),
        (json_error("9" * 5000), "a number has too many digits"),
    ],
)
def test_errors_of_libraries_are_translated(failure: Exception, reason: str) -> None:
    assert damage_of(FILE, failure) == reason


def test_a_lack_of_memory_is_not_blamed_on_the_file() -> None:
    failure = unreadable(FILE, pa.ArrowMemoryError("malloc of size 64 failed"), "check its content")
    assert (
        failure.message
        == "data file /data/rows.csv cannot be read as .csv: memory was lacking while it was read"
    )
    assert failure.hint == "free memory on the machine that reads it, or let fewer processes run there"
    assert (
        unreadable(FILE, pa.ArrowInvalid("Empty CSV file"), "check its content").hint == "check its content"
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"user,item,rating\n1,2,\xff\n", "it is not UTF-8 text"),
        (b"user,item,rating\n1,2," + b"x" * (9 << 20) + b"\n", "a row is longer than 4 MiB"),
        (b"", "has no column 'user'"),
        (b"\nuser,item,rating\n1,2,3\n", "line 1: it is blank"),
        (b"\xef\xbb\xbf\r\nuser,item,rating\r\n1,2,3\r\n", "line 1: it is blank"),
    ],
)
def test_sentences_of_pyarrow_are_known(tmp_path: Path, content: bytes, reason: str) -> None:
    """A later version of pyarrow may word its errors differently."""
    file = tmp_path / "ratings.csv"
    file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        list(ratings_blocks(file))
    assert reason in caught.value.message
