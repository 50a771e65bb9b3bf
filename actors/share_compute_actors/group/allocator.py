"""Control whether the C library keeps freed memory, and report a lack of memory.

While a shard is loaded or sent, the C library returns large freed blocks to the operating system. While steps run, it
keeps many freed blocks for reuse.
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
"""Upper limit of glibc's dynamic mmap threshold, in bytes. A process that allocates large tensors reaches it."""


@contextmanager
def passing_through() -> Iterator[None]:
    """Make glibc return large freed blocks to the system at once, inside a context that loads or sends a shard.

    Otherwise freed blocks stay in the heap between the tensors that remain (fragmentation). A member's memory then
    grows to one and a half times its shard (seen with glibc 2.36). Steps reuse freed memory, so afterwards the
    thresholds are set to the values that glibc's own adjustment reaches. With other C libraries, do nothing.
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
    """Return freed memory to the operating system; do nothing if the C library has no ``malloc_trim``."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is not None and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def is_out_of_memory(failure: Exception) -> bool:
    """Whether a failure means lack of memory; failures of torch's CPU allocator are recognized by their message."""
    is_of_cpu = isinstance(failure, RuntimeError) and "DefaultCPUAllocator" in str(failure)
    return is_of_cpu or isinstance(failure, (MemoryError, torch.OutOfMemoryError))


def as_reported(failure: Exception) -> ShareComputeError:
    """Convert an exception from a member's work into the error that the member reports.

    A lack of memory becomes `OutOfMemory`. Its detail ``taken_bytes`` is the peak memory that torch reserved on the
    GPU if GPU memory was lacking, else the resident memory of the process.
    """
    cause = failure.__cause__ if isinstance(failure.__cause__, RuntimeError) else failure
    if not is_out_of_memory(cause):
        return as_ours(failure)
    on_gpu = isinstance(cause, torch.OutOfMemoryError)
    taken_bytes = torch.cuda.max_memory_reserved() if on_gpu else psutil.Process().memory_info().rss
    return OutOfMemory(
        "out of memory during a step",
        hint="lend more memory there, use more stages, or smaller microbatches",
        details={"taken_bytes": taken_bytes},
    )
