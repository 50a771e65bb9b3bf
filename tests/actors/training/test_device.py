"""Members compute on the device that was measured, and on no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.actors.machine.test_node import StartHead, access, ports, rosters, start_head  # noqa: F401 - fixtures

from share_compute.errors import ContributorLost
from share_compute.settings import Settings
from share_compute_actors.machine.confine import landlock_version
from share_compute_actors.machine.cores import on_cores, share_cores
from share_compute_actors.machine.device import gpu_uuid, measured_device
from share_compute_actors.machine.head import Head
from share_compute_actors.machine.launch import RayNode, ray_environment
from share_compute_actors.machine.node import NodeLimits, start_node
from share_compute_actors.machine.ports import NodePorts
from share_compute_actors.machine.preflight import find_gpus
from share_compute_actors.machine.processes import ChildProcesses

PROBE = """
import json, os, sys, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

@ray.remote(num_cpus=0)
class Member:
    def environment(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES"), sorted(os.sched_getaffinity(0))

    def compute(self):
        import torch
        gpu = torch.device("cuda")
        return str(torch.cuda.get_device_properties(gpu).uuid), float(torch.ones(8, 8, device=gpu).mm(
            torch.ones(8, 8, device=gpu)).sum())

ray.init(address=sys.argv[1], log_to_driver=False)
here = NodeAffinitySchedulingStrategy(sys.argv[2], soft=False)
member = Member.options(scheduling_strategy=here).remote()
print(json.dumps([ray.cluster_resources().get("GPU", 0), ray.get(getattr(member, sys.argv[3]).remote())]))
"""


def ask_member(head: Head, node: RayNode, method: str) -> tuple[float, Any]:
    """Return the number of GPUs that Ray counts, and the answer of an actor on the node."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, head.ray_address, node.node_id, method],
        env={**os.environ, **ray_environment(head.place.token)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    gpus, answer = json.loads(done.stdout.splitlines()[-1])
    return gpus, answer


def test_another_gpu_than_the_measured_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured_device("cpu", "") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="aa-1"))
    assert measured_device("cuda", "aa-1") == torch.device("cuda")
    with pytest.raises(ContributorLost, match=r"GPU bb-2 was measured, but .* see GPU aa-1"):
        measured_device("cuda", "bb-2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ContributorLost, match=r"GPU bb-2 was measured, but .* see no GPU"):
        measured_device("cuda", "bb-2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "gpu", [pytest.param(None, marks=pytest.mark.thorough), "GPU-8f1c2d3e-0a1b-4c5d-9e8f-7a6b5c4d3e2f"]
)
def test_actors_of_a_node_see_its_gpu_alone(
    gpu: str | None,
    tmp_path: Path,
    rosters: list[ChildProcesses],  # noqa: F811
    ports: NodePorts,  # noqa: F811
    start_head: StartHead,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They ask Ray for no GPU. The devices that the owner made visible to this process do not matter."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    head = start_head(Settings(data_folder=tmp_path), rosters[0], "127.0.0.1")
    limits = NodeLimits(memory_bytes=600 * 2**20, cpu_threads=1, gpu=gpu)
    node = start_node(rosters[1], access(head), limits, ports)
    gpus, (visible, _cores) = ask_member(head, node, "environment")
    assert (gpus, visible) == (0 if gpu is None else 1, gpu or "")


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.skipif(os.geteuid() == 0 and landlock_version() > 0, reason="root lends no GPU")
def test_an_actor_of_a_confined_node_computes_on_its_gpu(
    tmp_path: Path,
    rosters: list[ChildProcesses],  # noqa: F811
    ports: NodePorts,  # noqa: F811
    start_head: StartHead,  # noqa: F811
) -> None:
    (first, *_others) = find_gpus()
    head = start_head(Settings(data_folder=tmp_path), rosters[0], "127.0.0.1")
    limits = NodeLimits(memory_bytes=600 * 2**20, cpu_threads=1, gpu=first.uuid)
    node = start_node(rosters[1], access(head), limits, ports)
    gpus, (uuid, total) = ask_member(head, node, "compute")
    assert (gpus, f"GPU-{uuid}", total) == (1, first.uuid, 512.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_torch_names_gpus_as_the_driver_does() -> None:
    found = {gpu.uuid for gpu in find_gpus()}
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        assert f"GPU-{gpu_uuid(device)}" in found
    assert measured_device("cuda", gpu_uuid(torch.device("cuda"))).type == "cuda"


@pytest.mark.skipif(sys.platform != "linux", reason="cores are shared out on Linux only")
def test_devices_share_the_cores_of_their_host() -> None:
    own = sorted(os.sched_getaffinity(0))
    assert share_cores(len(own) + 1) == ((),) * (len(own) + 1)
    parts = share_cores(min(2, len(own)))
    assert sorted(core for part in parts for core in part) == own
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    command = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    for part in ((), *parts):
        done = subprocess.run(on_cores(command, part), capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == sorted(part or own)
