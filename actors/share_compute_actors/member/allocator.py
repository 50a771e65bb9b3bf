"""Memory: how the C library keeps what is freed, and what it means when there is no more.

It keeps nothing while much passes through, and plenty while a step runs.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from share_compute.errors import OutOfMemory, ShareComputeError, as_ours

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


def trim() -> None:
    """Give back to the system what was freed, as far as the C library can."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is not None and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def peak_resident_bytes() -> int:
    """Return the most memory that this process had at one time."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def is_out_of_memory(failure: Exception) -> bool:
    """Whether there was no memory; torch's allocator for the CPU has no class of its own for that."""
    is_of_cpu = isinstance(failure, RuntimeError) and "DefaultCPUAllocator" in str(failure)
    return is_of_cpu or isinstance(failure, (MemoryError, torch.OutOfMemoryError))


def as_told(failure: Exception) -> ShareComputeError:
    """Return a failure of a member's work as it is told to people; one for lack of memory says how much there was."""
    cause = failure.__cause__ if isinstance(failure.__cause__, RuntimeError) else failure
    if not is_out_of_memory(cause):
        return as_ours(failure)
    on_gpu = isinstance(cause, torch.OutOfMemoryError)
    room_bytes = torch.cuda.max_memory_reserved() if on_gpu else psutil.Process().memory_info().rss
    return OutOfMemory(
        "there was no more memory in the midst of a step",
        mend="lend more memory there, use more pools, or smaller microbatches",
        details={"room_bytes": room_bytes},
    )
