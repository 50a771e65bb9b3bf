"""Reads .csv files in batches, of which few are in memory at a time.

The reader of pyarrow reads up to 32 blocks ahead, in its own thread: 128 MiB in blocks of 4 MiB. It has no option for
fewer, so this module makes its reads wait. A waiting read holds one of the few threads of pyarrow that read files.
Therefore few readers wait at a time; others read ahead as pyarrow does.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import IO, Any

_AHEAD = 4
"""Blocks that may be read before the batch of the first one is taken. pyarrow needs two for its first batch."""
_PATIENCE_S = 20.0
"""Time in which a wanted batch must come before one more block is read: a block that ends no row gives no batch."""
_MOST_WAITING = 4
"""Readers that may wait at a time. pyarrow has 8 threads that read files, unless it is set otherwise."""
_EXIT_S = 5.0
"""Longest wait for an open reader to end when the process exits."""
_IDLE_S = 0.5
"""Longest wait for the next read of a reader that is not reading."""


class _Waiting:
    """Counts the reads that wait, in all readers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def begin(self) -> bool:
        """Return whether one more read may wait; `end` must follow then."""
        import pyarrow as pa  # noqa: PLC0415 - heavy

        with self._lock:
            if self._count >= min(_MOST_WAITING, pa.io_thread_count() // 2):
                return False
            self._count += 1
            return True

    def end(self) -> None:
        with self._lock:
            self._count -= 1


_waiting = _Waiting()


class _LimitedReads:
    """A file whose reads wait until the batches of earlier reads are taken.

    Args:
        source: the opened file.
    """

    closed = False

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._changed = threading.Condition()
        self._permits = _AHEAD
        self._is_wanted = self._is_over = self._has_ended = False
        self._thread = 0
        """Identifier of the thread of pyarrow that read last."""
        _open.add(self)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes once the read is permitted; return nothing if no more batches are wanted."""
        with self._changed:
            self._thread = threading.get_ident()
            if self._permits < 1 and not self._is_over and _waiting.begin():
                try:
                    self._wait()
                finally:
                    _waiting.end()
            block = b"" if self._is_over else self._source.read(size)
            if not block:
                self._has_ended = True
                self._changed.notify_all()
            elif not block.isspace():  # empty lines give no batch
                self._permits = max(0, self._permits - 1)
            return block

    def _wait(self) -> None:
        while self._permits < 1 and not self._is_over:
            if not self._changed.wait(_PATIENCE_S) and self._is_wanted:
                break

    def taken(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, and permit a further read; None after the last one.

        Raises:
            OSError: the process exits.
        """
        self._is_wanted = True
        batch = next(batches, None)
        with self._changed:
            if self._is_over:
                raise OSError("the file was not read to its end, because the process exits")
            self._is_wanted = False
            self._permits += 1
            self._changed.notify_all()
        return batch

    def close(self) -> None:
        """Let the reader end without reading the rest; the source stays open."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait_for_end(self) -> None:
        """Wait until pyarrow has seen the end and its thread has left Python.

        If it does not read, wait a short time only.
        """
        began_s = time.monotonic()
        while (waited_s := time.monotonic() - began_s) < _EXIT_S:
            is_in_python = self._thread in sys._current_frames()  # noqa: SLF001 - a documented function
            if not is_in_python and (self._has_ended or waited_s > _IDLE_S):
                return
            time.sleep(0.001)


_open = weakref.WeakSet[_LimitedReads]()


@atexit.register
def _close_all() -> None:
    """End all reads: a thread of pyarrow that waits in Python when the interpreter ends would abort the process."""
    left = list(_open)
    for reads in left:
        reads.close()
    for reads in left:
        reads.wait_for_end()


def csv_batches(source: IO[bytes], read: Any, parse: Any, convert: Any) -> Iterator[Any]:
    """Yield the rows of a .csv file as record batches.

    Args:
        source: the opened file.
        read: a ``ReadOptions`` of pyarrow; it has the size of a block.
        parse: a ``ParseOptions``.
        convert: a ``ConvertOptions``.

    Raises:
        OSError: the file cannot be read.
        pyarrow.ArrowException: the file is malformed.
    """
    import pyarrow as pa  # noqa: PLC0415 - heavy
    from pyarrow import csv  # noqa: PLC0415 - heavy

    limited = _LimitedReads(source)
    try:
        batches = iter(csv.open_csv(pa.PythonFile(limited, mode="r"), read, parse, convert))
        while (batch := limited.taken(batches)) is not None:
            yield batch
    finally:
        limited.close()
