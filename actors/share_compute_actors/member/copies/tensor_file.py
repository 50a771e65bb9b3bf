"""Tensors by name on this machine's disk."""

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
from share_compute_actors.member.copies.room import Room


class _Place(NamedTuple):
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: int

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """Tensors in a file without a name, which is gone when it is closed or its process ends, however that ends.

    Methods may be called from any thread; who replaces a tensor sees to it that nobody reads it meanwhile.

    Args:
        room: where it lies, and how large it may grow.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._opened: IO[bytes] | None = None
        self._places: dict[str, _Place] = {}
        self._lock = threading.Lock()
        self.nbytes = 0
        """What it takes of the disk."""

    @property
    def names(self) -> list[str]:
        """Those of all tensors, in the order in which they came."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""
        return self._places[name].shape

    def put(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, or replace the one of this name.

        Raises:
            Unavailable: there is no room for it, or the disk cannot be written.
        """
        ready = tensor.detach().to("cpu").contiguous()
        content = ready.reshape(-1).view(torch.uint8).numpy().data
        with self._lock:
            before = self._places.get(name)
            begin = before.begin if before is not None and before.size == len(content) else self.nbytes
            end = max(self.nbytes, begin + len(content))
            self._room.take(end - self.nbytes)
            self.nbytes = end
        digest = xxhash.xxh3_64_intdigest(content)
        try:
            file, done = self._file().fileno(), 0
            while done < len(content):
                done += os.pwrite(file, content[done:], begin + done)
        except OSError as failure:
            raise Unavailable(
                f"a copy of another machine's part of the model cannot be written: {failure.strerror}",
                mend="free disk space in the folder for temporary files there, or set parallelism.buddies to false",
            ) from failure
        self._places[name] = _Place(begin, ready.dtype, tuple(ready.shape), digest)

    def _file(self) -> IO[bytes]:
        with self._lock:
            if self._opened is None:
                self._opened = tempfile.TemporaryFile(  # noqa: SIM115 - `close` closes it
                    prefix="share-compute-", dir=self._room.folder
                )
            return self._opened

    def get(self, name: str) -> Tensor:
        """Return a tensor.

        Raises:
            VerificationFailed: it is not what was written.
        """
        place = self._places[name]
        content = self._read(place.begin, place.size)
        if xxhash.xxh3_64_intdigest(content) != place.digest:
            raise VerificationFailed(
                f"{name} was damaged on the disk that keeps a copy of it",
                mend="check that machine's disk and memory",
            )
        return _tensor(content, place.dtype).reshape(place.shape)

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a tensor, flat; nobody looks whether they are what was written."""
        place = self._places[name]
        size = place.dtype.itemsize
        return _tensor(self._read(place.begin + start * size, (stop - start) * size), place.dtype)

    def rows(self, name: str, start: int, stop: int | None) -> Tensor:
        """Return rows [start, stop) of a tensor, as `part` does; a scalar has but one."""
        shape = self._places[name].shape
        if not shape:
            return self.part(name, 0, 1).reshape(())
        first, last, _ = slice(start, stop).indices(shape[0])
        row = math.prod(shape[1:])
        return self.part(name, first * row, last * row).reshape(last - first, *shape[1:])

    def verify(self) -> None:
        """Read everything once.

        Raises:
            VerificationFailed: something is not what was written.
        """
        for name in self.names:
            self.get(name)

    def close(self) -> None:
        """Give the room back."""
        with self._lock:
            if self._opened is not None:
                self._opened.close()
            self._room.give_back(self.nbytes)
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
        "the disk lost part of a copy of another machine's part of the model",
        mend="check that machine's disk",
    )


def _tensor(content: bytearray, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
