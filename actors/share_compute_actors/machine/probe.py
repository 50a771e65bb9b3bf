"""Measure the performance of a device of this machine.

Run as ``python -m share_compute_actors.machine.probe --json``, in a separate process, because the actor that needs the
result must not import torch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import psutil
import torch
from torch import distributed, nn

from share_compute.device_kinds import KINDS, DeviceKind
from share_compute.models.devices import OPERATIONS, DeviceOperations, operations
from share_compute.quantities import bytes_text
from share_compute.topology import Device
from share_compute_actors.machine.cores import leave_cores
from share_compute_actors.machine.device import join_process_group

_MEASURABLE_S = 0.03
_BUDGET_S = 0.35
"""Time limit for the measurement of one quantity, in seconds."""
_REPETITIONS = 5
_LARGEST_MATRIX = 8192
_SMALL, _CHAIN, _PASSES = 16, 8, 40
"""Width, number of layers and repetitions of the chain that measures the overhead of an operation."""
CHAIN_OPERATIONS = 97
"""Number of operations of one pass of the chain, as `OperationCounter` counts them.

It is not counted here: torch imports 800 modules for the first counter of a process, which takes a second.
"""
_COPY_BYTES = 64 * 2**20
_BUSY_MATRIX = 256
"""Rows and columns of the matrices that keep other processors busy; such a matrix fits into one core's cache."""
_FEW_NUMBERS, _SUM_NUMBERS = 16, 1 << 20
"""Sizes of the tensors with which sums between devices are measured, in float32 numbers."""
_MEETING_S = 60.0
"""Longest wait of a probe for those of the other devices, in seconds."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Lent:
    """Resources that the owner lends."""

    memory_bytes: int
    cpu_threads: int
    device: DeviceKind = "cpu"
    beside: int = 0
    """Number of threads that other contributors on this host use at the same time.

    The same number of processors is kept busy while the CPU is measured."""
    devices: int = 1
    """Number of devices that are lent together; each has a probe of its own."""
    place: int = 0
    """Number of the device among those."""


def probe(lent: Lent) -> Device:
    """Measure the lent device: the CPU, or the visible GPU of the lent kind with index ``place``.

    Raises:
        RuntimeError: GPUs are lent, but this process does not see exactly that number; or the machine has less memory
            than it lends.
    """
    has_bytes = psutil.virtual_memory().total
    if lent.memory_bytes > has_bytes:
        raise RuntimeError(
            f"{bytes_text(lent.memory_bytes)} of memory are lent, but the machine has {bytes_text(has_bytes)}"
        )
    torch.set_num_threads(lent.cpu_threads)
    kind = OPERATIONS[lent.device]
    if not kind.facts.is_gpu:
        with _busy(lent.beside):
            return cpu_device(lent)
    if kind.count() != lent.devices:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        label, found = kind.facts.label, kind.count()
        if lent.devices == 1:
            raise RuntimeError(
                f"one {label} is lent, but torch finds {found} (CUDA_VISIBLE_DEVICES={visible})"
            )
        raise RuntimeError(
            f"{lent.devices} {label}s are lent, but torch finds {found} (CUDA_VISIBLE_DEVICES={visible})"
        )
    kind.choose(lent.place)
    return _measured(kind, lent, 8 * _COPY_BYTES)


@contextmanager
def _busy(processors: int) -> Iterator[None]:
    """Keep a number of processors busy inside the block.

    Cores share caches, memory bandwidth and power, so each core is slower while others are busy.
    """
    children = [_fork_busy() for _ in range(processors)]
    try:
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _fork_busy() -> int:
    """Fork a process that multiplies matrices until this process ends; return the new process's pid.

    If this process is restricted to the processors of one contributor, the new process uses others, as the other
    contributors do. The fork is safe because torch has not started threads yet.
    """
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    leave_cores()
    torch.set_num_threads(1)
    factor = torch.rand(_BUSY_MATRIX, _BUSY_MATRIX)
    while os.getppid() == parent:
        torch.mm(factor, factor)
    os._exit(0)


def cpu_device(lent: Lent) -> Device:
    """Measure the CPU with the threads that torch uses in this process."""
    return _measured(OPERATIONS["cpu"], lent, _COPY_BYTES)


def _measured(kind: DeviceOperations, lent: Lent, copy_bytes: int) -> Device:
    own_bytes = kind.total_bytes()
    if own_bytes is None:
        memory_bytes = lent.memory_bytes
    else:  # a GPU with its own memory lends all of it
        memory_bytes = min(own_bytes, lent.memory_bytes) if kind.facts.uses_main_memory else own_bytes
    return Device(
        kind=kind.kind,
        name=kind.name(),
        memory_bytes=memory_bytes,
        flops_per_s=_speeds(kind.device),
        memory_bytes_per_s=_copy_speed(kind.device, min(copy_bytes, memory_bytes // 8)),
        overhead_s=_overhead_s(kind.device),
        uuid=kind.uuid(),
    )


def with_peers(device: Device, lent: Lent, folder: Path) -> Device:
    """Return a device with the measured time of sums with the other devices that are lent together.

    Args:
        device: the measured device.
        lent: the lent device.
        folder: folder in which the probes of all devices meet.
    """
    kind = OPERATIONS[lent.device]
    join_process_group(lent.device, lent.place, lent.devices, folder, _MEETING_S)
    try:
        few_s, many_s = _sum_s(kind, _FEW_NUMBERS), _sum_s(kind, _SUM_NUMBERS)
        return replace(
            device, peer_latency_s=few_s, peer_bytes_per_s=sum_bytes_per_s(_SUM_NUMBERS * 4, few_s, many_s)
        )
    finally:
        distributed.destroy_process_group()


def sum_bytes_per_s(num_bytes: int, few_s: float, many_s: float) -> float:
    """Return the rate of sums with other devices, in bytes per second.

    On a busy machine a sum of few numbers may take longer than one of many. So at least a tenth of the time of the
    latter counts as transfer; otherwise, the rate would be without bound, and plans would take such sums for free.

    Args:
        num_bytes: size of the tensor of many numbers.
        few_s: seconds of a sum of few numbers.
        many_s: seconds of a sum of many numbers.
    """
    return num_bytes / max(many_s - few_s, many_s / 10)


def _sum_s(kind: DeviceOperations, numbers: int) -> float:
    """Return the median time of a sum of ``numbers`` float32 numbers with the other devices, in seconds.

    The number of sums is fixed, because all probes must make equally many.
    """
    tensor, times = torch.zeros(numbers, device=kind.device), []
    for _ in range(_REPETITIONS + 1):
        kind.synchronize()
        begin = time.perf_counter()
        distributed.all_reduce(tensor)
        kind.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _speeds(device: torch.device) -> dict[str, float]:
    speeds = {name: _matmul_flops_per_s(device, dtype) for name, dtype in _DTYPES.items()}
    return {name: speed for name, speed in speeds.items() if speed > 0}


def _matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a square matrix product; 0 if the device does not support the dtype.

    The size doubles until one product takes at least 0.03 s, the size is 8192, or `_BUDGET_S` has passed.
    """
    size = 256
    started = time.perf_counter()
    try:
        while True:
            left, right = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
            out = torch.empty(size, size, device=device, dtype=dtype)
            elapsed = _median_s(partial(torch.mm, left, right, out=out), device, started)
            if (
                elapsed >= _MEASURABLE_S
                or size >= _LARGEST_MATRIX
                or time.perf_counter() - started > _BUDGET_S
            ):
                return 2.0 * size**3 / elapsed
            size *= 2
    except (RuntimeError, NotImplementedError) as failure:
        sys.stderr.write(f"no {dtype} on {device}: {failure}\n")
        return 0.0


def _copy_speed(device: torch.device, size_bytes: int) -> float:
    source = torch.ones(size_bytes, device=device, dtype=torch.uint8)
    target = torch.zeros_like(source)
    elapsed = _median_s(lambda: target.copy_(source), device, time.perf_counter())
    return 2.0 * size_bytes / elapsed


def _overhead_s(device: torch.device) -> float:
    """Return the time of one operation in seconds, measured with tiny layers that run forward and backward."""
    return _median_s(chain_pass(device), device, time.perf_counter(), _PASSES) / CHAIN_OPERATIONS


def chain_pass(device: torch.device) -> Callable[[], None]:
    """Return a function that runs tiny layers forward and backward, in `CHAIN_OPERATIONS` operations."""
    layers = (
        nn.Sequential(nn.Linear(_SMALL, _SMALL), nn.LayerNorm(_SMALL), nn.GELU()) for _ in range(_CHAIN)
    )
    chain = nn.Sequential(*layers).to(device)
    entering = torch.rand(_SMALL, _SMALL, device=device)

    def run() -> None:
        chain(entering).sum().backward()

    run()  # allocates the gradient tensors; later runs accumulate into them
    return run


def _median_s(
    work: Callable[[], object], device: torch.device, started: float, repetitions: int = _REPETITIONS
) -> float:
    """Return the median run time of ``work``, in seconds, after one warm-up run.

    The shortest run time would promise a speed that a processor reaches only in bursts.

    The measurement ends after ``repetitions`` runs, or `_BUDGET_S` after ``started`` if that is sooner.
    """
    times: list[float] = []
    finish = operations(device).synchronize
    work()
    for _ in range(repetitions):
        finish()
        begin = time.perf_counter()
        work()
        finish()
        times.append(time.perf_counter() - begin)
        if time.perf_counter() - started > _BUDGET_S:
            break
    return statistics.median(times)


def main() -> None:
    """Measure the device; print it as a JSON list on one line with ``--json``, otherwise as readable text."""
    parser = argparse.ArgumentParser(description="Measure what a device of this machine can do.")
    parser.add_argument("--memory-bytes", type=int, default=2**30)
    parser.add_argument("--cpu-threads", type=int, default=1)
    parser.add_argument("--beside", type=int, default=0, help="processors to keep busy meanwhile")
    parser.add_argument("--device", choices=tuple(KINDS), default="cpu")
    parser.add_argument("--devices", type=int, default=1, help="devices that are lent together")
    parser.add_argument("--place", type=int, default=0, help="number of this one of them")
    parser.add_argument("--meeting", type=Path, help="folder in which their probes meet")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    lent = Lent(
        *(given.memory_bytes, given.cpu_threads, given.device, given.beside), given.devices, given.place
    )
    try:
        device = probe(lent)
        if given.meeting is not None:
            device = with_peers(device, lent, given.meeting)
    except RuntimeError as failure:
        sys.exit(str(failure))
    if given.json:
        sys.stdout.write(json.dumps([asdict(device)]) + "\n")
        return
    speeds = ", ".join(f"{name} {speed / 1e9:.1f} GFLOP/s" for name, speed in device.flops_per_s.items())
    bandwidth = f"memory {device.memory_bytes_per_s / 1e9:.1f} GB/s"
    overhead = f"{device.overhead_s * 1e6:.1f} us an operation"
    sys.stdout.write(f"{device.kind} {device.name}: {speeds}, {bandwidth}, {overhead}\n")


if __name__ == "__main__":
    main()
