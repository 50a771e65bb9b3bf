"""Checks of this machine before it works: each gives one finding with its mend. Free of Ray and torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from share_compute.errors import ShareComputeError, Unavailable, UserError

LEAST_DISK_BYTES = 2**30
LEAST_MEMORY_BYTES = 512 * 2**20
_GPU_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    check: str
    state: Literal["ok", "warn", "fail"]
    text: str
    mend: str | None = None
    """What to do about it; there is one unless the state is ok."""
    details: dict[str, Any] = field(default_factory=dict)

    def require(self, kind: type[ShareComputeError] = UserError) -> None:
        """Raise ``kind`` if the check failed."""
        if self.state == "fail":
            raise kind(self.text, mend=self.mend, details=self.details)


def check_disk(folder: Path) -> Finding:
    """Whether the disk under ``folder`` (or its nearest parent that exists) has room."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    text = f"{format_bytes(free)} free under {folder}"
    if free >= LEAST_DISK_BYTES:
        return Finding("disk", "ok", text)
    return Finding(
        "disk",
        "fail",
        f"only {text}; at least {format_bytes(LEAST_DISK_BYTES)} are needed",
        mend="free some disk space",
        details={"missing_bytes": LEAST_DISK_BYTES - free},
    )


def check_memory(lent_bytes: int) -> Finding:
    """Whether enough memory is lent, and whether it is there."""
    available = psutil.virtual_memory().available
    if lent_bytes < LEAST_MEMORY_BYTES:
        return Finding(
            "memory",
            "fail",
            f"{format_bytes(lent_bytes)} of memory are too little; at least"
            f" {format_bytes(LEAST_MEMORY_BYTES)} are needed",
            mend="lend more with --memory, or end other programs",
            details={"missing_bytes": LEAST_MEMORY_BYTES - lent_bytes},
        )
    if lent_bytes > available:
        return Finding(
            "memory",
            "fail",
            f"{format_bytes(lent_bytes)} of memory are to be lent,"
            f" but only {format_bytes(available)} are available",
            mend="lend less with --memory, or end other programs",
            details={"missing_bytes": lent_bytes - available},
        )
    return Finding("memory", "ok", f"{format_bytes(lent_bytes)} lent, {format_bytes(available)} available")


def check_clock(skew_s: float, most_s: float = 30.0) -> Finding:
    """Whether this clock and the server's agree; ``skew_s`` is how far this one is ahead."""
    ahead = "ahead of" if skew_s > 0 else "behind"
    text = f"this clock is {abs(skew_s):.1f} s {ahead} the server's"
    if abs(skew_s) <= most_s:
        return Finding("clock", "ok", text)
    mend = "set both clocks by NTP, e.g. timedatectl set-ntp true"
    return Finding("clock", "fail", text, mend=mend, details={"skew_s": skew_s, "most_s": most_s})


def check_gpus() -> Finding:
    """Whether graphics processors are here, and whether their driver works."""
    try:
        names = gpu_names()
    except Unavailable as failure:
        return Finding("gpu", "warn", failure.message, mend=failure.mend)
    return Finding(
        "gpu", "ok", ", ".join(names) if names else "no NVIDIA driver; the processor does the work"
    )


def gpu_names() -> tuple[str, ...]:
    """Return the names of the graphics processors that NVIDIA's driver shows; empty without a driver.

    Raises:
        Unavailable: the driver does not work.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    mend = "install the driver anew, or join with --device cpu"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise Unavailable(f"nvidia-smi does not answer: {failure}", mend=mend) from failure
    if done.returncode != 0:
        last = (done.stdout + done.stderr).strip().splitlines()
        raise Unavailable(
            f"NVIDIA's driver does not work: {last[-1] if last else 'no reason given'}", mend=mend
        )
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())


def usable_threads() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def format_bytes(count: int) -> str:
    """Write a number of bytes for people."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit in ("B", "KiB", "MiB") else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def parse_bytes(text: str) -> int:
    """Read a size such as ``4GiB``, ``500 MB`` or ``1073741824``.

    Raises:
        UserError: it is none.
    """
    units = {"": 1, "b": 1}
    units |= {name + "ib": 1024**power for power, name in enumerate("kmgt", start=1)}
    units |= {name + "b": 1000**power for power, name in enumerate("kmgt", start=1)}
    units |= {name: 1024**power for power, name in enumerate("kmgt", start=1)}
    lowered = text.strip().lower()
    number = lowered.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = lowered[len(number) :].strip()
    try:
        size = float(number) * units[unit]
    except (KeyError, ValueError):
        size = 0.0
    if not 1 <= size < 2**63:
        raise UserError(f"{text!r} is not a size of memory", mend="write it like 4GiB or 500MB")
    return int(size)
