"""Checks to run before this machine starts a server or joins a cluster; each check returns a `CheckResult`.

This module imports neither Ray nor torch.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from share_compute.errors import ShareComputeError, Unavailable, UserError
from share_compute.quantities import bytes_text
from share_compute_actors.machine.confine import landlock_version

LEAST_DISK_BYTES = 2**30
LEAST_MEMORY_BYTES = 512 * 2**20
MOST_CLOCK_SKEW_S = 30.0
_GPU_TIMEOUT_S = 10.0
_COMPILER_TIMEOUT_S = 60.0
_CONNECT_S = 3.0
_SLOW_LOOKUP_S = 1.0
_NO_NAME = "share-compute.invalid."
"""A name that resolvers reject at once (RFC 6761); the final dot excludes search domains."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check."""

    check: str
    state: Literal["ok", "warn", "fail"]
    text: str
    hint: str | None = None
    """Hint that tells the user what to do; None if the state is ok."""
    details: dict[str, Any] = field(default_factory=dict)

    def require(self, kind: type[ShareComputeError] = UserError) -> None:
        """Raise ``kind`` if the check failed."""
        if self.state == "fail":
            raise kind(self.text, hint=self.hint, details=self.details)


def check_disk(folder: Path) -> CheckResult:
    """Check whether the disk of ``folder`` (or of its nearest existing parent) has enough free space."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    text = f"{bytes_text(free)} free under {folder}"
    if free >= LEAST_DISK_BYTES:
        return CheckResult("disk", "ok", text)
    return CheckResult(
        "disk",
        "fail",
        f"only {text}; at least {bytes_text(LEAST_DISK_BYTES)} are needed",
        hint="free some disk space",
        details={"missing_bytes": LEAST_DISK_BYTES - free},
    )


def check_memory(lent_bytes: int) -> CheckResult:
    """Check whether at least 512 MiB of memory are lent, and whether the lent memory is available."""
    available = psutil.virtual_memory().available
    if lent_bytes < LEAST_MEMORY_BYTES:
        return CheckResult(
            "memory",
            "fail",
            f"{bytes_text(lent_bytes)} of memory are too little; at least"
            f" {bytes_text(LEAST_MEMORY_BYTES)} are needed",
            hint="lend more with --memory, or end other programs",
            details={"missing_bytes": LEAST_MEMORY_BYTES - lent_bytes},
        )
    if lent_bytes > available:
        return CheckResult(
            "memory",
            "fail",
            f"{bytes_text(lent_bytes)} of memory are to be lent,"
            f" but only {bytes_text(available)} are available",
            hint="lend less with --memory, or end other programs",
            details={"missing_bytes": lent_bytes - available},
        )
    return CheckResult("memory", "ok", f"{bytes_text(lent_bytes)} lent, {bytes_text(available)} available")


def check_clock(skew_s: float, most_s: float = MOST_CLOCK_SKEW_S) -> CheckResult:
    """Check whether this machine's clock is within ``most_s`` of the server's clock.

    Args:
        skew_s: time of this machine's clock minus time of the server's clock, in seconds.
        most_s: largest allowed difference, in seconds.
    """
    text = f"this clock is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} the server's"
    if abs(skew_s) <= most_s:
        return CheckResult("clock", "ok", text)
    hint = "set both clocks by NTP, e.g. timedatectl set-ntp true"
    return CheckResult("clock", "fail", text, hint=hint, details={"skew_s": skew_s, "most_s": most_s})


def check_head(ray_address: str) -> CheckResult:
    """Check whether the Ray head at ``host:port`` can be reached from this machine."""
    host, _, port = ray_address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as failure:
        return CheckResult(
            "head",
            "fail",
            f"the Ray head at {ray_address} cannot be reached: {failure.strerror or failure}",
            hint=f"open TCP port {port} in the firewalls between, or have the operator start the server with"
            " --advertise-address set to an address that this machine reaches",
            details={"ray_address": ray_address},
        )
    return CheckResult("head", "ok", f"the Ray head at {ray_address} can be reached")


def check_resolver() -> CheckResult:
    """Check whether the resolver answers within 1 s; otherwise each lookup delays a program for seconds."""
    is_done = threading.Event()

    def look_up() -> None:
        with suppress(OSError):
            socket.getaddrinfo(_NO_NAME, None)
        is_done.set()

    start_s = time.monotonic()
    threading.Thread(target=look_up, name="resolver", daemon=True).start()  # a lookup cannot be cancelled
    if is_done.wait(_SLOW_LOOKUP_S):
        return CheckResult("resolver", "ok", f"it answers in {(time.monotonic() - start_s) * 1000:.0f} ms")
    return CheckResult(
        "resolver",
        "warn",
        f"looking up a name takes more than {_SLOW_LOOKUP_S:.0f} s: the resolver is slow, or does not answer",
        hint="remove resolvers that do not answer from /etc/resolv.conf",
    )


def check_walls() -> CheckResult:
    """Check whether this system can confine a Ray node to its own folders."""
    version = landlock_version()
    if version:
        return CheckResult("confinement", "ok", f"Landlock {version} confines Ray nodes to their own folders")
    return CheckResult(
        "confinement",
        "warn",
        "this system has no Landlock: holders of the cluster's token can read what this user can",
        hint="use Linux 5.13 or newer and, in a container, a seccomp profile that allows Landlock",
    )


def check_listening(address: str) -> CheckResult:
    """Check whether this machine can listen at an IP address, which must belong to this machine."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        socket.create_server((address, 0), family=family).close()
    except OSError as failure:
        return CheckResult(
            "address",
            "fail",
            f"this machine cannot listen at {address}: {failure.strerror or failure}",
            hint="give one of its own IP addresses with --address",
            details={"address": address},
        )
    return CheckResult("address", "ok", f"this machine can listen at {address}")


def route_address(target: str) -> str:
    """Return the source IP address of packets from this machine to ``target``; 127.0.0.1 if there is no route."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def check_devices() -> CheckResult:
    """Check whether the GPUs' driver works, and list the devices that `share-compute join` can lend."""
    cpu = f"cpu ({usable_threads()} threads)"
    try:
        found = find_gpus()
    except Unavailable as failure:
        return CheckResult("devices", "warn", f"{cpu}; {failure.message}", hint=failure.hint)
    lines = [f"cuda:{index} {gpu.name} ({gpu.uuid})" for index, gpu in enumerate(found)]
    if apple := find_apple_gpu():
        lines.append(f"mps {apple}")
    text = ", ".join([*lines, cpu])
    try:
        require_gpu_access(found)
    except Unavailable as failure:
        return CheckResult("devices", "warn", f"{text}; {failure.message}", hint=failure.hint)
    return CheckResult("devices", "ok", text)


def require_gpu_access(gpus: Sequence[object]) -> None:
    """Check that the confined processes of a node will be able to use the GPUs.

    Raises:
        Unavailable: there are GPUs, and this process is root, and `Policy.names_threads` does not apply to root.
    """
    if gpus and landlock_version() and os.geteuid() == 0:
        raise Unavailable(
            "a GPU cannot be lent by root: CUDA writes below /proc, where root could change the kernel's settings",
            hint="run share-compute join as another user, or join with --device cpu",
        )


def check_compiler() -> CheckResult:
    """Check whether a C++ compiler meets the needs of ``torch.compile``: OpenMP and the headers of Python."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return CheckResult(
            "compiler",
            "warn",
            "no C++ compiler: jobs and deployments with compile compute eagerly",
            hint="install g++ and the headers of Python, e.g. apt install g++ python3-dev",
        )
    headers = sysconfig.get_paths()["include"]
    command = [compiler, "-x", "c++", "-fopenmp", f"-I{headers}", "-c", "-o", os.devnull, "-"]
    program = "#include <Python.h>\n#include <vector>\n#include <omp.h>\n"
    hint = "install the headers of Python, e.g. apt install python3-dev, or reinstall the compiler"
    try:
        done = subprocess.run(
            command, input=program, capture_output=True, text=True, timeout=_COMPILER_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as failure:
        reason = str(failure)
    else:
        if done.returncode == 0:
            return CheckResult("compiler", "ok", f"{compiler} works")
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        reason = errors[0] if errors else f"it exits with {done.returncode}"
    text = f"{compiler} does not work, so jobs and deployments with compile compute eagerly: {reason}"
    return CheckResult("compiler", "warn", text, hint=hint)


class Gpu(NamedTuple):
    """A GPU, or a MIG instance (a part of a GPU)."""

    uuid: str
    """``GPU-...`` or ``MIG-...``, as ``CUDA_VISIBLE_DEVICES`` accepts it."""
    name: str


def find_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` selects; empty if ``nvidia-smi`` is not installed.

    Raises:
        Unavailable: the driver does not work.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, "--query-gpu=uuid,name", "--format=csv,noheader"]
    hint = "reinstall the driver, or join with --device cpu"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise Unavailable(f"nvidia-smi does not answer: {failure}", hint=hint) from failure
    if done.returncode != 0:
        last = (done.stdout + done.stderr).strip().splitlines()
        raise Unavailable(
            f"NVIDIA's driver does not work: {last[-1] if last else 'no reason given'}", hint=hint
        )
    found = [line.split(", ", 1) for line in done.stdout.splitlines() if ", " in line]
    return visible_gpus([Gpu(*pair) for pair in found], os.environ.get("CUDA_VISIBLE_DEVICES"))


def find_apple_gpu() -> str | None:
    """Return the name of the Apple processor whose GPU torch can use as ``mps``; None on other machines."""
    if (sys.platform, platform.machine()) != ("darwin", "arm64"):
        return None
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return "Apple GPU"
    return done.stdout.strip() or "Apple GPU"


def visible_gpus(found: Sequence[Gpu], wanted: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` selects, in its order.

    Each entry is an index or the beginning of a UUID. The first entry that matches no GPU ends the list. MIG instances
    (``MIG-...``) are accepted without a check, because ``found`` does not list them.

    Args:
        found: all GPUs of this machine.
        wanted: value of ``CUDA_VISIBLE_DEVICES``; None selects all GPUs.
    """
    if wanted is None:
        return tuple(found)
    visible: list[Gpu] = []
    for entry in (part.strip() for part in wanted.split(",")):
        by_index = [found[int(entry)]] if entry.isdecimal() and int(entry) < len(found) else []
        by_uuid = [gpu for gpu in found if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
        match = by_index or by_uuid or ([Gpu(entry, entry)] if entry.startswith("MIG-") else [])
        if not match:
            break
        visible.append(match[0])
    return tuple(visible)


def usable_threads() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_id() -> str:
    """Return a hash of the kernel's boot id and the processors that this process may use; empty without a boot id.

    Machines with the same hash share these processors, even if the machines are different containers. The hash reveals
    nothing else about the computer.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""
    named = f"share-compute {boot_id.strip()} {sorted(os.sched_getaffinity(0))}"
    return hashlib.sha256(named.encode()).hexdigest()[:16]
