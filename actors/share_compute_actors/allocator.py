"""How the C library keeps the memory that is freed: none of it while much passes through, plenty while a step runs."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""Where glibc's own adjustment ends up in a process that allocates large tensors."""


@contextmanager
def passing_through() -> Iterator[None]:
    """While a shard is loaded or sent, give every large block back to the system as soon as it is freed.

    Otherwise the pieces that came and went stay in the heap between the tensors that stay, and a member's memory
    grows to its shard and half as much again (seen with glibc 2.36). Training wants the opposite, so the thresholds
    are then set to what glibc itself arrives at.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    mallopt = getattr(library, "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, 2**20)
    try:
        yield
    finally:
        library.malloc_trim(0)  # type: ignore[union-attr]
        mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_MMAP_THRESHOLD)
