"""Results of the probe are measured, plausible and quick to get."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from pydantic import TypeAdapter
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

from share_compute.errors import Unavailable
from share_compute.models.profiles.profiling import OperationCounter
from share_compute.program import command_of
from share_compute.topology import Device, Link, absurdities
from share_compute_actors.machine import contributor, probe, reach
from share_compute_actors.machine.cores import leave_cores, restrict_thread
from share_compute_actors.machine.preflight import find_gpus
from share_compute_actors.machine.probe_links import measure_link
from share_compute_actors.machine.reach import Place
from share_compute_api.control.machines.machines import RayMachine

DEVICES: TypeAdapter[tuple[Device, ...]] = TypeAdapter(tuple[Device, ...])
LIMITS = {"memory_bytes": 5, "cpu_threads": 1, "device": "cpu"}
LAN, CUT = ("192.0.2.1", 1), ("192.0.2.2", 1)
MEASURED = Device("cpu", "x", 5, {"float32": 1.0}, 2.0, 3e-6)


def run_probe(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = command_of("share_compute_actors.machine.probe", *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@pytest.mark.slow
def test_the_processor_is_measured():
    done = run_probe("--json", "--device", "cpu", "--memory-bytes", str(2**30), "--cpu-threads", "1")
    (device,) = DEVICES.validate_json(done.stdout)
    assert (device.kind, device.memory_bytes) == ("cpu", 2**30)
    assert device.name
    assert 1e8 < device.flops_per_s["float32"] < 1e14
    assert 1e8 < device.memory_bytes_per_s < 1e13
    assert 1e-7 < device.overhead_s < 1e-3


@pytest.mark.skipif(len(psutil.Process().cpu_affinity()) < 2, reason="needs two processors")
def test_processes_that_load_other_processors_leave_those_of_the_probe():
    own, *others = sorted(os.sched_getaffinity(0))

    def places() -> list[set[int]]:
        restrict_thread([own])
        before = os.sched_getaffinity(0)
        leave_cores()
        return [before, os.sched_getaffinity(0)]

    with ThreadPoolExecutor(1) as thread:
        before, after = thread.submit(places).result()
    assert before == {own}
    assert own not in after
    assert after >= set(others)


def test_the_operations_of_the_chain_are_as_many_as_is_said():
    run, operations = probe.chain_pass(torch.device("cpu")), OperationCounter()
    with operations:
        run()
    assert operations.count == probe.CHAIN_OPERATIONS


def test_a_device_that_is_not_there_is_an_error():
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    done = run_probe("--json", "--device", "cuda")
    assert done.returncode != 0
    assert "one NVIDIA GPU is lent, but torch finds 0" in done.stderr


@pytest.mark.slow
def test_devices_that_are_lent_together_measure_their_sums(tmp_path: Path):
    together = ("--json", "--devices", "2", "--meeting", str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda place: run_probe(*together, "--place", str(place)), range(2)))
    for each in done:
        (device,) = DEVICES.validate_json(each.stdout)
        assert 1e-6 < device.peer_latency_s < 10
        assert 1e5 < device.peer_bytes_per_s < 1e13
        assert not list(absurdities(device))


@pytest.mark.parametrize(
    ("few_s", "many_s", "expected"), [(0.001, 0.005, 1e9), (0.005, 0.005, 8e9), (0.05, 0.005, 8e9)]
)
def test_the_rate_of_sums_is_bounded_on_a_busy_machine(few_s: float, many_s: float, expected: float):
    assert probe.sum_bytes_per_s(4_000_000, few_s, many_s) == pytest.approx(expected)


def test_as_many_gpus_as_are_lent_are_measured():
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    done = run_probe("--json", "--device", "cuda", "--devices", "2")
    assert "2 NVIDIA GPUs are lent, but torch finds 0" in done.stderr


def test_a_machine_that_measures_fewer_devices_than_it_lends_is_refused():
    with pytest.raises(Unavailable, match="it lends 2 devices, and measured 1"):
        asyncio.run(machine(json.dumps([asdict(MEASURED)])).probe({**LIMITS, "devices": 2}, 0))


def test_no_machine_lends_more_memory_than_it_has():
    done = run_probe("--json", "--device", "cpu", "--memory-bytes", str(2**50))
    assert done.returncode != 0
    assert "1.0 PiB of memory are lent, but the machine has" in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_exactly_the_gpu_that_is_lent_is_measured():
    for gpu in find_gpus():
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid}
        (device,) = DEVICES.validate_json(run_probe("--json", "--device", "cuda", env=variables).stdout)
        assert (device.kind, f"GPU-{device.uuid}") == ("cuda", gpu.uuid)
        assert device.flops_per_s["bfloat16"] > 1e12


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices here")
def test_a_probe_that_sees_several_gpus_measures_none():
    done = run_probe("--json", "--device", "cuda")
    assert done.returncode != 0
    assert "one NVIDIA GPU is lent" in done.stderr


def test_links_are_measured_from_the_times_of_echoes():
    latency_s, bytes_per_s, now_s = 0.002, 400e6, 0.0

    def echo(payload: np.ndarray) -> int:
        nonlocal now_s
        now_s += 2 * latency_s + payload.nbytes / bytes_per_s
        return payload.nbytes

    link = measure_link("a", "b", echo, clock=lambda: now_s)
    assert (link.source, link.target) == ("a", "b")
    assert link.latency_s == pytest.approx(latency_s)
    assert link.bytes_per_s == pytest.approx(bytes_per_s)


def test_a_peer_whose_host_does_not_answer_has_a_dead_link(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def answers(places: Collection[Place], within_s: float) -> dict[Place, str]:
        calls.append((set(places), within_s))
        return {LAN: "open"} if len(calls) == 1 else {}

    def echo(actor: str, payload: np.ndarray) -> int:
        assert actor == "present", "nothing is sent to a host that does not answer"
        return payload.nbytes

    monkeypatch.setattr(reach, "answers", answers)
    found = contributor.links_to("a", [("b", LAN, "present"), ("c", CUT, "hidden")], echo)
    assert [(link.target, link.is_dead) for link in found] == [("b", False), ("c", True)]
    assert [places for places, _ in calls] == [{LAN, CUT}, {CUT}]
    assert sum(within_s for _, within_s in calls) < 10


@pytest.mark.parametrize("failure", [GetTimeoutError(), ActorUnavailableError("it is away", None)])
def test_a_peer_that_does_not_answer_calls_has_a_dead_link(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def echo(actor: Exception, _payload: np.ndarray) -> int:
        raise actor

    monkeypatch.setattr(reach, "answers", lambda places, _: dict.fromkeys(places, "open"))
    found = contributor.links_to("a", [("b", LAN, failure), ("gone", LAN, RayActorError())], echo)
    assert [(link.target, link.is_dead) for link in found] == [("b", True)]


class Answering:
    """An actor on a contributor that gives the same answer to every call."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def call(self, _method: str, *_arguments: Any, **_limits: float) -> Any:
        return self._answer

    async def measure_links(self, _peers: Any, **_limits: float) -> Any:
        return self._answer


def machine(answer: Any) -> RayMachine:
    actor: Any = Answering(answer)
    return RayMachine("a", actor)


def test_measured_devices_are_read_back():
    message = asdict(MEASURED)
    assert asyncio.run(machine(json.dumps([message])).probe(LIMITS, 0)) == (MEASURED,)
    del message["overhead_s"]  # probes of earlier releases did not measure it
    assert asyncio.run(machine(json.dumps([message])).probe(LIMITS, 0)) == (
        replace(MEASURED, overhead_s=0.0),
    )


def test_only_requested_links_are_read_back():
    requested = Link("a", "b", 0.1, 3.0)
    others = (Link("c", "b", 0.1, 3.0), Link("a", "d", 0.1, 3.0))
    answer = json.dumps([asdict(link) for link in (requested, *others)])
    assert asyncio.run(machine(answer).measure_links([("b", machine(""))])) == (requested,)


@pytest.mark.parametrize("answer", [None, 3, [], "", "{", '[{"kind": "cpu"}]', " " * 2**21 + "[]"])
def test_another_answer_to_a_measurement_is_an_error_of_its_machine(answer: Any):
    with pytest.raises(Unavailable, match="invalid message") as failure:
        asyncio.run(machine(answer).probe(LIMITS, 0))
    assert failure.value.machine == "a"


def test_processors_of_others_are_busy_while_one_is_measured(monkeypatch: pytest.MonkeyPatch):
    """As in operation, where machines share a host. The processes that keep the processors busy are ended."""
    seen: list[list[psutil.Process]] = []

    def watched(lent: probe.Lent) -> Device:
        seen.append(psutil.Process().children())
        return replace(MEASURED, memory_bytes=lent.memory_bytes)

    monkeypatch.setattr(probe, "cpu_device", watched)
    before = set(psutil.Process().children())
    probe.probe(probe.Lent(2**30, 1, "cpu", beside=2))
    assert len(set(seen[0]) - before) == 2
    assert not set(psutil.Process().children()) - before
