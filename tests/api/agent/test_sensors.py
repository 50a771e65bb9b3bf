"""Sensors of an agent: processors, memory, GPU and network of its machine."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from share_compute_api.agent.sensors import Sensors, SensorThread

GPU = "GPU-8f1c2d3e-0a1b-4c5d-9e8f-7a6b5c4d3e2f"


def sensors(threads: int = 1, *gpus: str) -> Sensors:
    return Sensors(lambda: [psutil.Process()], threads, gpus, lambda: "127.0.0.1")


def test_the_processor_time_of_the_lent_share_is_a_part_of_the_lent_threads() -> None:
    found = sensors(threads=1000)
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    used = found.read()
    assert used.cpu_fraction is not None
    assert 0 < used.cpu_fraction < 0.01
    assert used.host_cpu_fraction is not None
    assert used.memory_bytes is not None
    assert 2**20 < used.memory_bytes < 2**40
    assert used.received_bytes_per_s is not None
    assert used.gpu_fraction is None


@pytest.mark.parametrize(
    ("printed", "fraction", "celsius"),
    [("83, 2048, 81920, 61", 0.83, 61.0), ("[N/A], 2048, 81920, [N/A]", None, None)],
)
def test_the_lent_gpu_is_measured_by_the_tool_of_its_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, fraction: Any, celsius: Any
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\ntest "$1" = --id={GPU} && echo "{printed}"\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    used = sensors(1, GPU).read()
    assert (used.gpu_fraction, used.gpu_celsius, used.busy_fraction == fraction) == (
        fraction,
        celsius,
        fraction is not None,
    )
    assert (used.gpu_memory_bytes, used.gpu_total_bytes) == (2048 << 20, 81920 << 20)


def test_the_figures_of_gpus_that_are_lent_together_are_those_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ntest "$1" = --id=GPU-a,GPU-b && printf "80, 2048, 8192, 61\\n40, 1024, 8192, 70\\n"\n'
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    used = sensors(1, "GPU-a", "GPU-b").read()
    assert used.gpu_fraction == pytest.approx(0.6)
    assert (used.gpu_celsius, used.gpu_memory_bytes, used.gpu_total_bytes) == (70.0, 3072 << 20, 16384 << 20)


def test_a_broken_driver_leaves_the_other_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    used = sensors(1, GPU).read()
    assert used.gpu_fraction is None
    assert used.cpu_fraction is not None


def test_each_measurement_is_taken_once() -> None:
    thread = SensorThread(sensors, period_s=0.01)
    while (found := thread.take()) is None:
        time.sleep(0.001)
    thread.stop()
    assert found.cpu_fraction is not None


def test_measurements_continue_after_a_failure() -> None:
    failures = iter([OSError("no /proc/stat"), RuntimeError("no sensor")])

    def processes() -> list[psutil.Process]:
        for failure in failures:
            raise failure
        return [psutil.Process()]

    thread = SensorThread(lambda: Sensors(processes, 1, (), lambda: None), period_s=0.01)
    while (found := thread.take()) is None:
        time.sleep(0.001)
    thread.stop()
    assert found.cpu_fraction is not None
