"""Measures the utilization of this machine every 10 s, in a thread: processors, memory, GPU, temperature, network."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import psutil

from share_compute_api.schemas.utilization import Utilization

PERIOD_S = 10.0
_GPU_TIMEOUT_S = 5.0
_GPU_QUERY = "utilization.gpu,memory.used,memory.total,temperature.gpu"
_MIB = 2**20
_PROCESSOR_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal", "acpitz")
"""Drivers of temperature sensors of processors; the first one that exists is used."""
_COLDEST, _HOTTEST = -50.0, 200.0


class Sensors:
    """Sensors of this machine. A figure whose sensor is missing or fails is None.

    Args:
        processes: returns the processes of the lent share.
        threads: number of lent CPU threads.
        gpus: UUIDs of the lent GPUs; empty for a CPU.
        address: returns the IP address whose network interface is measured; None while it is unknown.
    """

    def __init__(
        self,
        processes: Callable[[], Iterable[psutil.Process]],
        threads: int,
        gpus: tuple[str, ...],
        address: Callable[[], str | None],
    ) -> None:
        self._processes = processes
        self._threads = threads
        self._gpus = gpus
        self._address = address
        self._busy_s: dict[psutil.Process, float] = {}
        """Processor time of each process of the lent share, in seconds, at the last measurement."""
        self._host = psutil.cpu_times()
        self._network = self._counted()
        self._at = time.monotonic()
        self._share()

    def read(self) -> Utilization:
        """Measure now; rates and fractions are means over the time since the last call."""
        now = time.monotonic()
        elapsed_s = max(1e-3, now - self._at)
        self._at = now
        used_s, memory = self._share()
        received, sent = self._rates(elapsed_s)
        return Utilization(
            cpu_fraction=min(1.0, used_s / (elapsed_s * self._threads)),
            host_cpu_fraction=self._host_fraction(),
            memory_bytes=memory,
            cpu_celsius=_processor_celsius(),
            received_bytes_per_s=received,
            sent_bytes_per_s=sent,
            **_gpu_figures(self._gpus),
        )

    def _share(self) -> tuple[float, int]:
        """Return the processor time in seconds since the last call, and the memory in bytes, of the lent share."""
        used_s, memory = 0.0, 0
        known, self._busy_s = self._busy_s, {}
        for process in self._processes():
            with suppress(psutil.Error):
                with process.oneshot():
                    times, held = process.cpu_times(), process.memory_info()
                busy_s = times.user + times.system
                self._busy_s[process] = busy_s
                used_s += max(0.0, busy_s - known.get(process, 0.0))
                # Pages that several processes share, such as libraries, would be counted several times.
                memory += max(0, held.rss - getattr(held, "shared", 0))
        return used_s, memory

    def _counted(self) -> tuple[str, int, int] | None:
        address = self._address()
        return None if address is None else _counters(address)

    def _rates(self, elapsed_s: float) -> tuple[float | None, float | None]:
        """Return the bytes/s that were received and sent since the last call; None if the interface has changed."""
        before, self._network = self._network, self._counted()
        now = self._network
        if before is None or now is None or before[0] != now[0]:
            return None, None
        return max(0, now[1] - before[1]) / elapsed_s, max(0, now[2] - before[2]) / elapsed_s

    def _host_fraction(self) -> float | None:
        before, now = self._host, psutil.cpu_times()
        self._host = now
        # The kernel counts the time of guests within `user` and `nice`.
        names = [name for name in now._fields if name not in {"guest", "guest_nice"}]
        passed = {name: max(0.0, getattr(now, name) - getattr(before, name)) for name in names}
        total = sum(passed.values())
        idle = passed.get("idle", 0.0) + passed.get("iowait", 0.0)
        return None if total <= 0 else min(1.0, max(0.0, 1 - idle / total))


class SensorThread:
    """Reads the sensors every 10 s in a daemon thread, so that a slow driver delays no heartbeat.

    Args:
        sensors: creates the sensors, in the thread.
        period_s: time between two measurements, in seconds.
    """

    def __init__(self, sensors: Callable[[], Sensors], period_s: float = PERIOD_S) -> None:
        self._sensors = sensors
        self._period_s = period_s
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._latest: Utilization | None = None
        threading.Thread(target=self._run, name="sensors", daemon=True).start()

    def _run(self) -> None:
        sensors: Sensors | None = None
        found: Utilization | None = None
        while True:
            try:
                if sensors is None:
                    sensors = self._sensors()
                else:
                    found = sensors.read()
            except Exception:  # noqa: BLE001 - drivers fail in many ways, and the next measurement may succeed
                found = None
            with self._lock:
                self._latest = found
            if self._stopped.wait(self._period_s):
                return

    def take(self) -> Utilization | None:
        """Return each measurement once; None until there is a new one."""
        with self._lock:
            found, self._latest = self._latest, None
        return found

    def stop(self) -> None:
        """End the thread after the measurement that it makes."""
        self._stopped.set()


def _counters(address: str) -> tuple[str, int, int] | None:
    """Return the interface that has an IP address, and the bytes that it received and sent since the start of the host.

    If none has the address, for example behind NAT, the sums of all interfaces except loopback are returned.
    """
    try:
        addresses, found = psutil.net_if_addrs(), psutil.net_io_counters(pernic=True)
    except (OSError, RuntimeError):  # a container may hide them
        return None
    for name, own in addresses.items():
        if name in found and any(one.address.partition("%")[0] == address for one in own):
            return name, found[name].bytes_recv, found[name].bytes_sent
    others = [one for name, one in found.items() if not name.startswith("lo")]
    return "", sum(one.bytes_recv for one in others), sum(one.bytes_sent for one in others)


def _processor_celsius() -> float | None:
    """Return the highest temperature of the processors; None without a sensor, as on virtual machines."""
    read: Callable[[], dict[str, Any]] | None = getattr(psutil, "sensors_temperatures", None)
    if read is None:
        return None
    try:
        found = read()
    except (OSError, RuntimeError, ValueError):
        return None
    chip = next((found[name] for name in _PROCESSOR_CHIPS if found.get(name)), ())
    return max((one.current for one in chip if _COLDEST <= one.current <= _HOTTEST), default=None)


def _gpu_figures(gpus: tuple[str, ...]) -> dict[str, Any]:
    """Return the utilization of GPUs, as ``nvidia-smi`` reports it; empty without a GPU, or for MIG instances.

    For several GPUs, the busy part is the mean, memory is the sum, and the temperature is that of the hottest GPU.
    """
    is_whole = bool(gpus) and all(gpu.startswith("GPU-") for gpu in gpus)
    program = shutil.which("nvidia-smi") if is_whole else None
    if program is None:
        return {}
    command = [
        program,
        f"--id={','.join(gpus)}",
        f"--query-gpu={_GPU_QUERY}",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = [
        [_number(word) for word in [*line.split(","), "", "", "", ""][:4]] for line in _lines(done.stdout)
    ]
    busy, used, total, celsius = (
        None if not column or None in column else [number for number in column if number is not None]
        for column in zip(*rows, strict=True)
    )
    hottest = None if celsius is None else max(celsius)
    return {
        "gpu_fraction": None if busy is None else min(1.0, max(0.0, sum(busy) / len(busy) / 100)),
        "gpu_memory_bytes": None if used is None else int(sum(used) * _MIB),
        "gpu_total_bytes": None if total is None else int(sum(total) * _MIB),
        "gpu_celsius": hottest if hottest is not None and _COLDEST <= hottest <= _HOTTEST else None,
    }


def _lines(text: str) -> list[str]:
    """Return the lines of a text; one empty line if the text is empty."""
    return text.splitlines() or [""]


def _number(word: str) -> float | None:
    """Parse a non-negative number; None for other words, such as ``[N/A]``."""
    text = word.strip()
    return float(text) if text.replace(".", "", 1).isdecimal() else None
