"""Divides this host's cores among the devices that it lends, so that no two devices share a processor."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

_PIN = """\
import os, sys
os.sched_setaffinity(0, map(int, sys.argv[1].split(",")))
os.execvp(sys.argv[2], sys.argv[2:])
"""
_CPUS = Path("/sys/devices/system/cpu")
_PLACE = ("physical_package_id", "core_id")
"""Files with the numbers of a logical processor's socket and core; core numbers are unique within a socket."""


def share_cores(count: int) -> tuple[tuple[int, ...], ...]:
    """Return ``count`` disjoint sets of the logical processors that this process may use.

    Restrictions of single threads (`restrict_thread`) do not change the result. Processors are sorted by socket and
    physical core, so that most sets consist of whole cores of one socket. The sets are empty if there are too few
    processors, or if the system is not Linux.
    """
    if sys.platform != "linux" or len(os.sched_getaffinity(os.getpid())) < count:
        return ((),) * count
    cores = sorted(os.sched_getaffinity(os.getpid()), key=_place)
    bounds = [len(cores) * part // count for part in range(count + 1)]
    return tuple(tuple(cores[start:stop]) for start, stop in pairwise(bounds))


def restrict_thread(cores: Sequence[int]) -> None:
    """Restrict the calling thread, and threads that it starts, to some logical processors; do nothing without any."""
    if cores and sys.platform == "linux":
        os.sched_setaffinity(0, cores)


def leave_cores() -> None:
    """Move the calling thread to the processors that it is not restricted to, if the system allows some of them."""
    if sys.platform == "linux":
        others = set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0)
        with suppress(OSError):  # none is left, or the control group allows none of them
            os.sched_setaffinity(0, others)


def on_cores(command: Sequence[str], cores: Sequence[int]) -> list[str]:
    """Return a command that restricts ``command`` to logical processors; ``command`` itself if ``cores`` is empty."""
    if not cores:
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _PIN, ",".join(map(str, cores)), *command]


def _place(core: int) -> tuple[int, ...]:
    folder = _CPUS / f"cpu{core}" / "topology"
    try:
        return (*(int((folder / name).read_text()) for name in _PLACE), core)
    except (OSError, ValueError):  # some virtual machines do not report the location
        return (0, core, core)
