"""Counts the bytes that a member exchanges with other machines, and limits them to the rates that an owner set.

The members of one contributor share its rates exactly. Each rate has a small file in the folder for temporary files,
with the state of a `TokenBucket`; a member locks the file, reserves its transfer and then waits.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import NamedTuple

from share_compute.protocol.membership import Worker
from share_compute.rate_limit import TokenBucket

_STATE = struct.Struct("<dd")
"""The bucket's state, and the time when it was written, in seconds on the computer's monotonic clock."""


class RateLimits(NamedTuple):
    """Rates in bytes per second that an owner allows a contributor; 0.0 for no limit."""

    upload_bytes_per_s: float = 0.0
    download_bytes_per_s: float = 0.0


NO_LIMITS = RateLimits()


class SharedBucket:
    """A token bucket that several processes of one computer share through a file.

    Args:
        file: file with the state; it is made when it is first used.
        bucket: the rate.
    """

    def __init__(self, file: Path, bucket: TokenBucket) -> None:
        self._file = file
        self._bucket = bucket

    def reserve(self, size_bytes: int) -> float:
        """Reserve a transfer, and return the seconds to wait before it begins."""
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            now_s = time.monotonic()
            due_s = _due_s(os.pread(descriptor, _STATE.size, 0), now_s)
            due_s, wait_s = self._bucket.take(due_s, now_s, size_bytes)
            os.pwrite(descriptor, _STATE.pack(due_s, now_s), 0)
        finally:
            os.close(descriptor)
        return wait_s


def _due_s(written: bytes, now_s: float) -> float:
    """Return the bucket's state; ``-inf`` if none was written since the computer started.

    The monotonic clock restarts with the computer, so an older state may seem to be from the future.
    """
    if len(written) != _STATE.size:
        return -inf
    due_s, written_s = _STATE.unpack(written)
    return float(due_s) if written_s <= now_s else -inf


class Traffic:
    """Counts the bytes of one member's transfers, and waits where a rate is limited. Thread-safe.

    A receiver waits before it requests the next data, and a sender waits before it hands data over. So waiting data is
    not copied, and a slow receiver does not make a sender's queues grow.

    Args:
        worker: the contributor, whose members share its rates.
        limits: the contributor's rates.
        folder: folder of the shared files; default: the folder for temporary files.
        sleep: waits for a number of seconds.
    """

    def __init__(
        self,
        worker: Worker,
        limits: RateLimits,
        folder: Path | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        place = folder or Path(tempfile.gettempdir())
        self._upload, self._download = (
            SharedBucket(place / f"share-compute-{way}-{worker}", TokenBucket(rate)) if rate else None
            for way, rate in (
                ("upload", limits.upload_bytes_per_s),
                ("download", limits.download_bytes_per_s),
            )
        )
        self._sleep = sleep
        self._lock = threading.Lock()
        self._sent = self._received = 0

    @property
    def sent_bytes(self) -> int:
        """Number of bytes that this member has sent."""
        return self._sent

    @property
    def received_bytes(self) -> int:
        """Number of bytes that this member has received."""
        return self._received

    def send(self, size_bytes: int) -> None:
        """Wait until the upload rate allows a transfer, and count it."""
        self._wait(self._upload, size_bytes)
        self.count(sent=size_bytes)

    def receive(self, size_bytes: int) -> None:
        """Wait until the download rate allows a transfer, and count it; call this before the data is requested."""
        self._wait(self._download, size_bytes)
        self.count(received=size_bytes)

    def count(self, *, sent: int = 0, received: int = 0) -> None:
        """Count bytes that no rate of this member limits, without a wait."""
        with self._lock:
            self._sent += sent
            self._received += received

    def _wait(self, bucket: SharedBucket | None, size_bytes: int) -> None:
        wait_s = 0.0 if bucket is None or size_bytes == 0 else bucket.reserve(size_bytes)
        if wait_s > 0:
            self._sleep(wait_s)
