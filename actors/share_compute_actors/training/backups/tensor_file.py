"""A temporary file that stores tensors by name."""

from __future__ import annotations

import math
import os
import tempfile
import threading
from typing import IO, NamedTuple

import torch
import xxhash
from torch import Tensor

from share_compute.errors import Unavailable, VerificationFailed
from share_compute_actors.training.backups.copy_quota import CopyQuota


class _Place(NamedTuple):
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: int

    @property
    def size(self) -> int:
        """Size of the tensor, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """Stores tensors in an unnamed temporary file. The system deletes the file when it is closed or its process ends.

    Methods may be called from any thread. While a tensor is replaced, no other thread may read it.

    Args:
        quota: provides the folder of the file, and limits the total size of the member's copies.
    """

    def __init__(self, quota: CopyQuota) -> None:
        self._quota = quota
        self._opened: IO[bytes] | None = None
        self._places: dict[str, _Place] = {}
        self._lock = threading.Lock()
        self.nbytes = 0
        """Size of the file, in bytes."""

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in the order in which they were added."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""
        return self._places[name].shape

    def put(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, or replace the tensor of the same name.

        Raises:
            Unavailable: there is not enough space, or the file cannot be written.
        """
        ready = tensor.detach().to("cpu").contiguous()
        content = ready.reshape(-1).view(torch.uint8).numpy().data
        with self._lock:
            before = self._places.get(name)
            begin = before.begin if before is not None and before.size == len(content) else self.nbytes
            end = max(self.nbytes, begin + len(content))
            self._quota.take(end - self.nbytes)
            self.nbytes = end
        digest = xxhash.xxh3_64_intdigest(content)
        try:
            file, done = self._file().fileno(), 0
            while done < len(content):
                done += os.pwrite(file, content[done:], begin + done)
        except OSError as failure:
            raise Unavailable(
                f"a copy of another machine's part of the model cannot be written: {failure.strerror}",
                hint="free disk space in the folder for temporary files there, or set parallelism.backups to false",
            ) from failure
        self._places[name] = _Place(begin, ready.dtype, tuple(ready.shape), digest)

    def _file(self) -> IO[bytes]:
        with self._lock:
            if self._opened is None:
                self._opened = tempfile.TemporaryFile(  # noqa: SIM115 - `close` closes it
                    prefix="share-compute-", dir=self._quota.folder
                )
            return self._opened

    def get(self, name: str) -> Tensor:
        """Return a tensor after verifying its digest.

        Raises:
            VerificationFailed: the data differs from the written data, or cannot be read.
        """
        place = self._places[name]
        content = self._read(place.begin, place.size)
        if xxhash.xxh3_64_intdigest(content) != place.digest:
            raise VerificationFailed(
                f"{name} was damaged in its backup copy on the disk",
                hint="check that machine's disk and memory",
            )
        return _tensor(content, place.dtype).reshape(place.shape)

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a flattened tensor without verifying its digest.

        Raises:
            VerificationFailed: the data cannot be read.
        """
        place = self._places[name]
        size = place.dtype.itemsize
        return _tensor(self._read(place.begin + start * size, (stop - start) * size), place.dtype)

    def rows(self, name: str, start: int, stop: int | None) -> Tensor:
        """Return rows [start, stop) of a tensor without verifying its digest; return a scalar whole.

        Raises:
            VerificationFailed: the data cannot be read.
        """
        shape = self._places[name].shape
        if not shape:
            return self.part(name, 0, 1).reshape(())
        first, last, _ = slice(start, stop).indices(shape[0])
        row = math.prod(shape[1:])
        return self.part(name, first * row, last * row).reshape(last - first, *shape[1:])

    def verify(self) -> None:
        """Read all tensors, and verify their digests.

        Raises:
            VerificationFailed: some data differs from the written data, or cannot be read.
        """
        for name in self.names:
            self.get(name)

    def close(self) -> None:
        """Delete the file, and release its space."""
        with self._lock:
            if self._opened is not None:
                self._opened.close()
            self._quota.give_back(self.nbytes)
            self.nbytes = 0

    def _read(self, begin: int, size: int) -> bytearray:
        content = bytearray(size)
        file, done = self._file().fileno(), 0
        while done < size:
            try:
                piece = os.pread(file, min(size - done, 2**30), begin + done)
            except OSError as failure:
                raise _lost() from failure
            if not piece:
                raise _lost()
            content[done : done + len(piece)] = piece
            done += len(piece)
        return content


def _lost() -> VerificationFailed:
    return VerificationFailed(
        "part of a backup copy of another machine's shard could not be read back from the disk",
        hint="check that machine's disk",
    )


def _tensor(content: bytearray, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
