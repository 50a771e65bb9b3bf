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

from share_compute.device_kinds import DeviceKind
from share_compute.errors import ContributorLost
from share_compute.models.devices import OPERATIONS
from share_compute.settings import Settings
from share_compute.specification.synchronization import MOST_BRANCHES
from share_compute_actors.group.naming import gpu_options
from share_compute_actors.machine.confine import landlock_version
from share_compute_actors.machine.cores import on_cores, share_cores
from share_compute_actors.machine.device import join_process_group, measured_device
from share_compute_actors.machine.head import Head
from share_compute_actors.machine.launch import RayNode, ray_environment
from share_compute_actors.machine.node import NodeLimits, start_node
from share_compute_actors.machine.ports import NodePorts
from share_compute_actors.machine.preflight import find_gpus
from share_compute_actors.machine.processes import ChildProcesses

PROBE = """
import json, os, sys, time, ray
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.autoscaler.v2.utils import ClusterStatusFormatter
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from share_compute_actors.group.naming import gpu_options

@ray.remote(num_cpus=0)
class Member:
    def environment(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES"), sorted(os.sched_getaffinity(0))

    def compute(self):
        import torch
        gpu = torch.device("cuda")
        return str(torch.cuda.get_device_properties(gpu).uuid), float(torch.ones(8, 8, device=gpu).mm(
            torch.ones(8, 8, device=gpu)).sum())

def in_use():
    return ray.cluster_resources().get("GPU", 0) - ray.available_resources().get("GPU", 0)

address, node_id, method, kind = sys.argv[1:]
ray.init(address=address, log_to_driver=False)
where = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}
# The actor that measures a device asks for no GPU; the others do what members of two jobs do.
members = [Member.options(**where, **gpu_options(kind)).remote() for _ in range(2)]
answers = ray.get([getattr(actor, method).remote() for actor in [Member.options(**where).remote(), *members]])
until = time.monotonic() + 20  # nodes report their resources a moment later
while kind != "cpu" and in_use() < 0.25 and time.monotonic() < until:
    time.sleep(0.1)
shown = ClusterStatusFormatter.format(get_cluster_status(address))  # the text of `ray status`
for member in members:  # the next one need not wait until Ray has released the parts of killed members
    ray.kill(member)
answers.append(ray.get(getattr(Member.options(**where, **gpu_options(kind)).remote(), method).remote()))
print(json.dumps([[line.strip() for line in shown.splitlines() if line.endswith(" GPU")], answers]))
"""


def ask_members(head: Head, node: RayNode, method: str, kind: DeviceKind) -> tuple[list[str], list[Any]]:
    """Return the lines about GPUs of ``ray status`` while two members run, and the answers of four actors."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, head.ray_address, node.node_id, method, kind],
        env={**os.environ, **ray_environment(head.place.token)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines, answers = json.loads(done.stdout.splitlines()[-1])
    return lines, answers


def test_another_gpu_than_the_measured_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured_device("cpu", ()) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="aa-1"))
    assert measured_device("cuda", ["aa-1"]) == torch.device("cuda")
    with pytest.raises(ContributorLost, match=r"GPU bb-2 was measured, but .* see GPU aa-1"):
        measured_device("cuda", ["bb-2"])
    with pytest.raises(ContributorLost, match=r"GPU bb-2 was measured, but .* see no GPU"):
        measured_device("cuda", ["aa-1", "bb-2"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ContributorLost, match=r"GPU bb-2 was measured, but .* see no GPU"):
        measured_device("cuda", ["bb-2"])


@pytest.mark.parametrize(("kind", "library"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_devices_are_connected_when_they_have_joined(
    kind: DeviceKind, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL connects later unless torch gets the device, and would then choose among all network devices."""
    joined: dict[str, Any] = {}

    def init(backend: str, **options: Any) -> None:
        found = os.environ["NCCL_SOCKET_IFNAME"], os.environ["GLOO_SOCKET_IFNAME"]
        joined.update(backend=backend, device=options["device_id"], names=found)

    monkeypatch.setattr(torch.distributed, "init_process_group", init)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    join_process_group(kind, 1, 2, tmp_path, 60)
    device = torch.device("cuda", 1) if kind == "cuda" else None
    assert (joined["backend"], joined["device"]) == (library, device)
    assert len(set(joined["names"])) == 1
    assert joined["names"][0].startswith("lo")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth1"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    # NCCL chooses once in a process, and a member that trains may join its stage's group on other hosts later.
    join_process_group(kind, 1, 2, tmp_path, 60, spans_hosts=True)
    assert joined["names"][0] == "eth1"
    assert joined["names"][1].startswith("lo")


@pytest.mark.parametrize("branches", [1, 3, 8, MOST_BRANCHES])
def test_the_members_of_all_branches_fit_on_one_gpu_beside_those_that_end(branches: int) -> None:
    assert gpu_options("cpu", branches) == {}
    part = gpu_options("cuda", branches)["num_gpus"]
    assert round(part, 4) == part > 0, "Ray divides a GPU into 10,000 units"
    assert part * branches <= 1 / 8
    several = gpu_options("cuda", branches, devices=2)["num_gpus"]
    assert part < several <= 1 / 4 / branches


@pytest.mark.slow
@pytest.mark.parametrize(
    "gpus",
    [
        pytest.param((), marks=pytest.mark.thorough),
        ("GPU-8f1c2d3e-0a1b-4c5d-9e8f-7a6b5c4d3e2f",),
        pytest.param(("GPU-aa", "GPU-bb"), marks=pytest.mark.thorough),
    ],
)
def test_members_see_the_gpus_of_their_node_alone_and_reserve_parts_of_them(
    gpus: tuple[str, ...],
    tmp_path: Path,
    rosters: list[ChildProcesses],  # noqa: F811
    ports: NodePorts,  # noqa: F811
    start_head: StartHead,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The devices that the owner made visible to this process do not matter."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    kind: DeviceKind = "cuda" if gpus else "cpu"
    head = start_head(Settings(data_folder=tmp_path), rosters[0], "127.0.0.1")
    limits = NodeLimits(memory_bytes=600 * 2**20, cpu_threads=1, device=kind, devices=len(gpus), gpus=gpus)
    node = start_node(rosters[1], access(head), limits, ports)
    shown, answers = ask_members(head, node, "environment", kind)
    assert {visible for visible, _cores in answers} == {",".join(gpus)}
    assert shown == ([f"0.25/{len(gpus)}.0 GPU"] if gpus else [])


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.skipif(os.geteuid() == 0 and landlock_version() > 0, reason="root lends no GPU")
def test_members_of_a_confined_node_compute_on_its_gpu(
    tmp_path: Path,
    rosters: list[ChildProcesses],  # noqa: F811
    ports: NodePorts,  # noqa: F811
    start_head: StartHead,  # noqa: F811
) -> None:
    (first, *_others) = find_gpus()
    head = start_head(Settings(data_folder=tmp_path), rosters[0], "127.0.0.1")
    limits = NodeLimits(memory_bytes=600 * 2**20, cpu_threads=1, device="cuda", gpus=(first.uuid,))
    node = start_node(rosters[1], access(head), limits, ports)
    shown, answers = ask_members(head, node, "compute", "cuda")
    assert shown == ["0.25/1.0 GPU"]
    assert {(f"GPU-{uuid}", total) for uuid, total in answers} == {(first.uuid, 512.0)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_torch_names_gpus_as_the_driver_does() -> None:
    found = {gpu.uuid for gpu in find_gpus()}
    for index in range(torch.cuda.device_count()):
        assert f"GPU-{OPERATIONS['cuda'].uuid(index)}" in found
    assert measured_device("cuda", [OPERATIONS["cuda"].uuid()]).type == "cuda"


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
