"""Controls whether the C library keeps freed memory, and translates errors of torch, such as a lack of memory."""

from __future__ import annotations

import ctypes
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from share_compute.errors import OutOfMemory, ShareComputeError, UserError, as_ours
from share_compute.models.devices import lacking

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""Upper limit of glibc's dynamic mmap threshold on 64-bit systems, in bytes; see mallopt(3)."""
_NONDETERMINISTIC = "does not have a deterministic implementation"
"""Part of torch's error for an operation that cannot compute deterministically; the operation's name precedes it."""


@contextmanager
def passing_through() -> Iterator[None]:
    """Make glibc return large freed blocks to the system at once, inside a context that loads or sends a shard.

    Without this, fragmentation made a member's memory grow to 1.5 times its shard (measured with glibc 2.36). After the
    context, glibc keeps freed blocks for reuse again. Do nothing if the C library is not glibc.
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
    """Return whether an exception means a lack of memory, including the RuntimeErrors of torch's allocators."""
    return isinstance(failure, OutOfMemory) or lacking(failure) is not None


def out_of_memory_kills(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return how often the Linux kernel has killed a process to free memory; None if the kernel does not report this.

    Only processes in the control group of this process count. If the group has no such figure, the figure of the whole
    system is returned.

    Args:
        proc: where the proc filesystem is mounted.
        groups: where control groups are mounted, of version 1 or 2.
    """
    files = [proc / "vmstat"]
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own = path.lstrip("/")
            if not controllers:
                files.insert(0, groups / own / "memory.events")
            elif "memory" in controllers.split(","):
                files.insert(0, groups / "memory" / own / "memory.oom_control")
    for file in files:
        with suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
            if found is not None:
                return int(found[1])
    return None


def as_reported(failure: Exception) -> ShareComputeError:
    """Convert an exception from a member's work into the error that the member reports.

    A lack of memory becomes `OutOfMemory` with the detail ``taken_bytes``. If GPU memory was lacking, this is the peak
    memory on the GPU, else the resident memory of the process. An operation that has no
    deterministic algorithm (see `DeviceOperations`) becomes a `UserError`.
    """
    if isinstance(failure, OutOfMemory):
        return failure
    cause = failure.__cause__ if isinstance(failure.__cause__, RuntimeError) else failure
    if isinstance(cause, RuntimeError) and _NONDETERMINISTIC in str(cause):
        operation = str(cause).partition(_NONDETERMINISTIC)[0].strip()
        return UserError(
            f"the model cannot be trained on GPUs: their operation {operation} gives other numbers in each run",
            hint="train on machines that lend their CPU, or choose layers without this operation",
        )
    kind = lacking(cause)
    if kind is None:
        return as_ours(failure)
    on_gpu_bytes = kind.peak_bytes()
    taken_bytes = psutil.Process().memory_info().rss if on_gpu_bytes is None else on_gpu_bytes
    return OutOfMemory(
        "out of memory during a step",
        hint="lend more memory there, use more stages, or smaller microbatches",
        details={"taken_bytes": taken_bytes},
    )
