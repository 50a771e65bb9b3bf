"""What the probe says is measured, plausible and quick."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from share_compute.topology import Device
from share_compute_actors.machine.contributor import read_devices, read_links
from share_compute_actors.machine.probe_links import measure_link


def run_probe(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "share_compute_actors.machine.probe", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_processor_is_measured():
    done = run_probe("--json", "--device", "cpu", "--memory-bytes", str(2**30), "--cpu-threads", "1")
    (device,) = read_devices(done.stdout)
    assert (device.kind, device.memory_bytes) == ("cpu", 2**30)
    assert device.name
    assert 1e8 < device.flops_per_s["float32"] < 1e14
    assert 1e8 < device.memory_bytes_per_s < 1e13
    assert 1e-7 < device.overhead_s < 1e-3


def test_a_device_that_is_not_there_is_an_error():
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    done = run_probe("--json", "--device", "cuda")
    assert done.returncode != 0
    assert "no CUDA device" in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_graphics_processors_are_measured():
    devices = read_devices(run_probe("--json", "--device", "cuda").stdout)
    assert devices
    assert all(device.kind == "cuda" and device.flops_per_s["bfloat16"] > 1e12 for device in devices)


def test_links_are_measured_from_real_delays():
    latency_s, bytes_per_s = 0.002, 400e6

    def echo(payload: np.ndarray) -> int:
        finish = time.perf_counter() + 2 * latency_s + payload.nbytes / bytes_per_s
        while time.perf_counter() < finish:
            pass
        return payload.nbytes

    link = measure_link("a", "b", echo)
    assert (link.source, link.target) == ("a", "b")
    assert link.latency_s == pytest.approx(latency_s, rel=0.3)
    assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=0.3)


def test_messages_are_read_back():
    device = Device("cpu", "x", 5, {"float32": 1.0}, 2.0, 3e-6)
    message = {
        "kind": "cpu",
        "name": "x",
        "memory_bytes": 5,
        "flops_per_s": {"float32": 1.0},
        "memory_bytes_per_s": 2.0,
        "overhead_s": 3e-6,
    }
    assert read_devices(json.dumps([message])) == (device,)
    del message["overhead_s"]  # as probes of earlier releases wrote it, which the store keeps
    assert read_devices(json.dumps([message])) == (replace(device, overhead_s=0.0),)
    (link,) = read_links('[{"source": "a", "target": "b", "latency_s": 0.1, "bytes_per_s": 3.0}]')
    assert link.target == "b"
