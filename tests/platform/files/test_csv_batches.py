"""Reading of .csv files in batches: few blocks are read ahead, and the reader ends when it is abandoned."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import pytest
from pyarrow import csv

from share_compute.files.csv_batches import csv_batches

BLOCK = 1 << 12
AHEAD = 4


class CountedReads(io.BytesIO):
    """Bytes that count how often a part of them was read."""

    reads = 0

    def read(self, size: int | None = -1) -> bytes:
        self.reads += 1
        return super().read(size)


def batches(source: io.BytesIO) -> Any:
    options = csv.ReadOptions(block_size=BLOCK, use_threads=False)
    return csv_batches(source, options, csv.ParseOptions(newlines_in_values=True), csv.ConvertOptions())


def table(rows: int, gap: str = "") -> bytes:
    return "".join(["number\n", *(f"{number}\n{gap}" for number in range(rows))]).encode()


def test_few_blocks_are_read_before_their_batches_are_taken() -> None:
    content = table(100_000)
    source, numbers = CountedReads(content), list[int]()
    for taken, batch in enumerate(batches(source), start=1):
        assert source.reads <= taken + AHEAD
        numbers += batch.column(0).to_pylist()
    assert numbers == list(range(100_000))
    assert source.reads > len(content) // BLOCK > 10 * AHEAD


def test_blocks_of_empty_lines_are_read() -> None:
    source = io.BytesIO(b"number\n1\n" + b"\n" * (10 * AHEAD * BLOCK) + b"2\n")
    found = [value for batch in batches(source) for value in batch.column(0).to_pylist()]
    assert found == [1, 2]


def test_a_reader_that_is_abandoned_leaves_the_rest_unread() -> None:
    source = CountedReads(table(100_000))
    reader = batches(source)
    next(reader)
    reader.close()
    assert source.reads <= 1 + AHEAD + 1
    assert not source.closed


def test_a_read_that_fails_ends_the_reader() -> None:
    class BrokenReads(CountedReads):
        def read(self, size: int | None = -1) -> bytes:
            if self.reads == 3:
                raise OSError("the disk is gone")
            return super().read(size)

    with pytest.raises(OSError, match="the disk is gone"):
        list(batches(BrokenReads(table(100_000))))


PROGRAM = """
import io, sys, threading
from pyarrow import csv
from share_compute.files.csv_batches import csv_batches

def reader():
    content = b"number\\n" + b"".join(b"%d\\n" % number for number in range(50_000))
    options = csv.ReadOptions(block_size=1 << 12, use_threads=False)
    return csv_batches(io.BytesIO(content), options, csv.ParseOptions(newlines_in_values=True), csv.ConvertOptions())
"""
EXITS = {
    "paused": "readers = [reader() for _ in range(2)]; firsts = [next(each) for each in readers]; sys.exit(7)",
    "exception": "readers = [reader() for _ in range(6)]; firsts = [next(each) for each in readers]; 1 / 0",
    "daemon": """
paused = threading.Event()
def work():
    for _ in reader():
        paused.set()
        threading.Event().wait()
threading.Thread(target=work, daemon=True).start()
paused.wait()
sys.exit(7)
""",
    "nine": """
count = 0
for batches in zip(*[reader() for _ in range(9)], strict=True):
    count += sum(batch.num_rows for batch in batches)
sys.exit(7 if count == 450_000 else 1)
""",
}


@pytest.mark.parametrize("how", EXITS)
def test_a_process_ends_with_open_readers_and_reads_nine_files_in_turn(how: str) -> None:
    program = [sys.executable, "-c", PROGRAM + EXITS[how]]
    ended = subprocess.run(program, check=False, capture_output=True, text=True, timeout=240)
    assert ended.returncode == (1 if how == "exception" else 7), ended.stderr
    assert ("ZeroDivisionError" in ended.stderr) == (how == "exception")


def test_rows_of_nearly_a_block_are_read() -> None:
    row = "x" * (BLOCK - 10)
    source = io.BytesIO(("text\n" + f"{row}\n" * 50).encode())
    assert sum(batch.num_rows for batch in batches(source)) == 50
