"""Several devices of one host join by one invite and are lent side by side; here, parts of a CPU."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.api.agent.test_service import door  # noqa: F401 - a fixture
from tests.conftest import descendants, ready
from tests.ray_nodes import title
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import get_scheduler

from share_compute.data import StepOrder, prepare
from share_compute.errors import Conflict, UserError
from share_compute.lifecycle.states import ContributorState, JobState
from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage
from share_compute.models.storage.weights import WeightFolder
from share_compute.shards import Shard
from share_compute.specification import parse_job
from share_compute.store import ContributorRecord, JobRecord, Store
from share_compute.topology import MOST_DEVICES
from share_compute_actors.machine.confine import landlock_version
from share_compute_actors.machine.preflight import Gpu
from share_compute_actors.machine.processes import is_alive
from share_compute_api.agent import devices as devices_module
from share_compute_api.agent.devices import LentDevice, lent_devices
from share_compute_api.agent.host import enroll
from share_compute_api.agent.joining import JoinOptions, resolve_limits, split
from share_compute_api.client.client import Client
from share_compute_api.connection.identity import Identities

GPUS = (Gpu("GPU-aa", "first"), Gpu("GPU-bb", "second"))
MIB = 2**20


@pytest.mark.parametrize(
    ("wanted", "gpus", "names"),
    [
        ((), (), ["cpu"]),
        ((), GPUS, ["cuda:0", "cuda:1"]),
        (("auto",), GPUS, ["cuda:0", "cuda:1"]),
        (("cuda",), GPUS, ["cuda:0", "cuda:1"]),
        (("cuda:1",), GPUS, ["cuda:1"]),
        (("cpu",), GPUS, ["cpu"]),
        (("cuda:1", "cpu"), GPUS, ["cuda:1", "cpu"]),
        (("cpu:0", "cpu:1"), (), ["cpu:0", "cpu:1"]),
        (("cpu:0+cpu:1", "cpu:2"), (), ["cpu:0+cpu:1", "cpu:2"]),
        (("cuda:1+cuda:0", "cpu"), GPUS, ["cuda:1+cuda:0", "cpu"]),
    ],
)
def test_devices_are_named(
    wanted: tuple[str, ...], gpus: tuple[Gpu, ...], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices_module, "find_gpus", lambda: gpus)
    found = lent_devices(wanted)
    assert [device.name for device in found] == names
    by_name = {f"cuda:{index}": gpu.uuid for index, gpu in enumerate(gpus)}
    assert [device.gpus for device in found] == [
        tuple(by_name[each] for each in device.names if each in by_name) for device in found
    ]


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (("gpu",), "'gpu' is no device"),
        (("cuda:2",), "the GPUs here are cuda:0 first, cuda:1 second"),
        (("cpu:1", "cpu:1"), "cpu:1 is named twice"),
        (("cuda", "cuda:0"), "cuda:0 is named twice"),
        (("cpu:0+cpu:1", "cpu:1+cpu:2"), "cpu:1 is named twice"),
        (("cpu:0+cpu:0",), "cpu:0 is named twice"),
        (("cuda:0+cuda:2",), "cuda:2, but the GPUs here are cuda:0 first, cuda:1 second"),
        (("cpu:0+gpu:1",), "'gpu:1' is no device"),
        (("cuda:0+cpu:0",), r"cuda:0\+cpu:0 joins devices of two kinds, cpu and cuda"),
        (("cuda:0+cuda",), "cuda cannot be lent together with other devices"),
        (("mps+cpu:0",), "mps cannot be lent together with other devices"),
        (("cpu:0+",), "'' is no device"),
        (("+".join(f"cpu:{number}" for number in range(MOST_DEVICES + 1)),), "17 devices"),
        (tuple(f"cpu:{number}" for number in range(MOST_DEVICES + 1)), "17 devices"),
    ],
)
def test_devices_that_cannot_be_lent_are_named(
    wanted: tuple[str, ...], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices_module, "find_gpus", lambda: GPUS)
    with pytest.raises(UserError, match=problem):
        lent_devices(wanted)


def test_what_is_lent_is_divided_among_devices() -> None:
    options = JoinOptions(
        "http://h:1", None, "box", memory_bytes=2048 * MIB, cpu_threads=1, upload_bytes_per_s=100_001
    )
    (whole,) = split(options, [LentDevice("cuda:0", ("GPU-aa",))])
    assert (whole.name, whole.memory_bytes) == ("box", 2048 * MIB)
    parts = split(options, [LentDevice("cpu:0"), LentDevice("cuda:1", ("GPU-bb",))])
    assert [part.name for part in parts] == ["box.cpu0", "box.cuda1"]
    assert [(part.memory_bytes, part.cpu_threads) for part in parts] == [(1024 * MIB, 1)] * 2
    assert whole.upload_bytes_per_s == 100_001
    assert [(part.upload_bytes_per_s, part.download_bytes_per_s) for part in parts] == [(50_000, None)] * 2
    with pytest.raises(UserError, match="too low for 2 devices"):
        split(replace(options, upload_bytes_per_s=8_000), [part.device for part in parts])
    with pytest.raises(UserError, match="are available"):
        split(replace(options, memory_bytes=2**60), [part.device for part in parts])


def test_devices_that_are_lent_together_have_the_parts_of_all() -> None:
    options = JoinOptions(
        "http://h:1", None, "box", memory_bytes=1800 * MIB, cpu_threads=1, download_bytes_per_s=90_000
    )
    (whole,) = split(options, [LentDevice("cuda:0+cuda:1", ("GPU-aa", "GPU-bb"))])
    assert (whole.name, whole.memory_bytes) == ("box", 1800 * MIB)
    limits = resolve_limits(whole)
    assert (limits.device, limits.devices, limits.gpus) == ("cuda", 2, ("GPU-aa", "GPU-bb"))
    parts = split(options, [LentDevice("cpu:0+cpu:2"), LentDevice("cpu:1")])
    assert [part.name for part in parts] == ["box.cpu0-2", "box.cpu1"]
    assert [(part.memory_bytes, part.cpu_threads) for part in parts] == [(1200 * MIB, 2), (600 * MIB, 1)]
    assert [part.download_bytes_per_s for part in parts] == [60_000, 30_000]
    with pytest.raises(UserError, match="2 parts of the CPU, but only 1 of its threads are lent"):
        resolve_limits(replace(whole, device=LentDevice("cpu:0+cpu:1")))


def test_all_devices_join_with_one_invite(door: str, store: Store, tmp_path: Path) -> None:  # noqa: F811
    identities = Identities(tmp_path / "own")

    def enrolled(invite: str | None, *names: str) -> dict[str, str]:
        """Join with these logical devices; return contributors by name."""
        options = JoinOptions(door, invite, "box", memory_bytes=len(names) * 600 * MIB, cpu_threads=1)
        enroll(split(options, [LentDevice(name) for name in names]), lambda _: None, identities, "box")
        return {
            one.name: one.id for one in store.contributors.list(list(ContributorState)) if not one.left_at
        }

    with pytest.raises(UserError, match="did not join"):
        enrolled(None, "cpu:0", "cpu:1")
    _, code = store.invites.create()
    first = enrolled(code, "cpu:0", "cpu:1")
    assert sorted(first) == ["box.cpu0", "box.cpu1"]
    assert enrolled(None, "cpu:0", "cpu:1") == first  # they have their keys
    more = enrolled(None, "cpu:0", "cpu:1", "cpu:2")  # a device that was added needs no invite
    assert more.keys() - first.keys() == {"box.cpu2"}
    with pytest.raises(Conflict, match=r"box\.cpu0"):
        enrolled(store.invites.create()[1], "cpu:0", "cpu:1")
    for contributor in more.values():
        store.contributors.leave(contributor)
    again = enrolled(store.invites.create()[1], "cpu:0", "cpu:1")
    assert not set(again.values()) & set(more.values())  # a new invite makes new contributors for all devices
    assert store.contributors.get(again["box.cpu1"]).sibling_of == again["box.cpu0"]
    for contributor in again.values():
        store.contributors.leave(contributor)
    # If only one device is left, the host has its own name again, and still needs no invite.
    assert store.contributors.get(enrolled(None, "cpu")["box"]).sibling_of == again["box.cpu0"]


@pytest.mark.slow
def test_devices_of_a_host_are_listed_together_and_removed_together(plane: Any, run: Any) -> None:
    store = plane.store
    facts: dict[str, Any] = {
        "host": "box",
        "versions": {},
        "limits": {"memory_bytes": 2**30, "cpu_threads": 1},
    }
    first, _ = store.contributors.join(store.invites.create()[1], name="box.cpu0", **facts)
    other, _ = store.contributors.join(store.invites.create()[1], name="other", **facts)
    second, _ = store.contributors.join_sibling(first.id, name="box.cpu1", **facts)
    listed = json.loads(run("contributors", "--json").stdout)["items"]
    assert [one["name"] for one in listed] == ["box.cpu0", "box.cpu1", "other"]
    result = run("remove", "box.cpu1", "--keep-token", text="y\n")
    assert result.returncode == UserError.exit_code, "without a terminal, --yes is needed"
    assert "Remove box.cpu1 and, of the same host, box.cpu0?" in result.stderr
    assert run("remove", "box.cpu1", "--keep-token", "--yes").returncode == 0
    states = [store.contributors.get(one.id).state.value for one in (first, second, other)]
    assert states == ["left", "left", "joining"]


JOB = {
    "name": "two devices",
    "model": {
        "layers": [
            {"type": "linear", "options": {"in_features": 64, "out_features": 48}},
            {"type": "relu"},
            {"type": "linear", "options": {"in_features": 48, "out_features": 10}},
        ]
    },
    "data": {"dataset": "digits"},
    "training": {"steps": 5, "batch_size": 64, "microbatches": 8},
    "parallelism": {"stages": 2, "members_per_stage": 1, "strategy": "uniform"},
}


def trained(client: Client, wait_for: Any, job: dict[str, Any] = JOB) -> tuple[dict[str, Tensor], set[str]]:
    """Train a small model; return its weights, and the ids of the contributors that trained it."""
    job_id = client.submit(job).id

    def ended() -> JobRecord | None:
        job = client.job(job_id)
        return job if job.state.is_final else None

    job = wait_for(ended, "the end of the job")
    assert job.state is JobState.succeeded, job.reason
    (model,) = client.artifacts(job_id)
    members = {member.contributor_id for stage in job.plan.stages for member in stage.members}
    saved = WeightFolder(model.path)
    return {name: saved.read(name) for name in saved.names()}, members


def trained_in_one_process(folder: Path, device: str = "cpu") -> dict[str, Tensor]:
    """Train the same model by a plain loop of torch, whole batches at a time; return its weights."""
    spec = parse_job(JOB)
    assert spec.model.layers is not None
    samples, count = prepare(spec, folder).samples, len(spec.model.layers)
    stage = build_stage(
        Blueprint(layers=spec.model.layers), Shard("m", 0, count, count), torch.device(device)
    )
    stage.initialize(spec.training.seed)
    options = spec.training.optimizer
    optimizer = torch.optim.AdamW(
        stage.module.parameters(), options.learning_rate, options.betas, weight_decay=options.weight_decay
    )
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=0, num_training_steps=spec.training.steps)
    order = StepOrder(spec.training.seed, samples.size("train"), spec.training.batch_size)
    for step in range(1, spec.training.steps + 1):
        drawn = samples.take("train", order.indices(step))
        inputs, targets = (torch.tensor(rows, device=device) for rows in drawn)
        optimizer.zero_grad()
        cross_entropy(stage.module(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(stage.module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return stage.module.state_dict()


@pytest.mark.slow
@pytest.mark.thorough
def test_one_command_lends_two_devices(server: Any, run_command: Any, wait_for: Any, tmp_path: Path) -> None:
    def ready(*names: str) -> dict[str, ContributorRecord]:
        found = {one.name: one for one in client.contributors(state=[ContributorState.ready])}
        return {name: found[name] for name in names} if found.keys() >= set(names) else {}

    with server.client() as client:
        code = client.create_invite(label="box").code
        lent = (
            "--memory",
            "1200MiB",
            "--cpu-threads",
            "2",
            "--device",
            "cpu:0",
            "--device",
            "cpu:1",
            "--json",
        )
        own = {"SHARE_COMPUTE_DATA_FOLDER": str(tmp_path), "SHARE_COMPUTE_INVITE": code}
        with run_command(tmp_path, "join", server.url, "--name", "box", *lent, **own) as host:
            names = ("box.cpu0", "box.cpu1")
            devices = wait_for(lambda: ready(*names), "both devices")
            assert [one.limits["cpu_threads"] for one in devices.values()] == [1, 1]
            raylets = {name: raylet_of(host.process.pid, name) for name in names}
            cores = [set(raylet.cpu_affinity()) for raylet in raylets.values()]
            assert cores[0] | cores[1] == os.sched_getaffinity(0)
            assert not cores[0] & cores[1] or len(os.sched_getaffinity(0)) == 1
            weights, members = trained(client, wait_for)
            assert members == {one.id for one in devices.values()}
            torch.testing.assert_close(weights, trained_in_one_process(tmp_path), atol=1e-5, rtol=0)

            agent_of(host.process.pid, "box.cpu1").kill()
            lost = devices["box.cpu1"].id
            wait_for(lambda: client.contributor(lost).state is ContributorState.lost, "the loss of one")
            assert client.contributor(devices["box.cpu0"].id).state is ContributorState.ready
            wait_for(lambda: ready(*names), "its return")
            assert ready(*names)["box.cpu1"].id == lost
            assert raylets["box.cpu0"].is_running()

            family = psutil.Process(host.process.pid).children(recursive=True)
            assert host.stop() == 0
            assert not any(is_alive(process) for process in family)
        assert {client.contributor(one.id).state for one in devices.values()} == {ContributorState.left}
        phases = {(line["name"], line["phase"]) for line in host.json_lines()}
        assert {(name, "left") for name in names} <= phases


@pytest.mark.slow
@pytest.mark.thorough
def test_devices_that_are_lent_together_train_as_one_machine(
    server: Any, run_command: Any, wait_for: Any, tmp_path: Path
) -> None:
    lent = (
        "--name",
        "pair",
        "--memory",
        "1200MiB",
        "--cpu-threads",
        "2",
        "--device",
        "cpu:0+cpu:1",
        "--json",
    )
    with server.client() as client:
        code = client.create_invite(label="pair").code
        own = {"SHARE_COMPUTE_DATA_FOLDER": str(tmp_path), "SHARE_COMPUTE_INVITE": code}
        with run_command(tmp_path, "join", server.url, *lent, **own) as host:
            pair = wait_for(lambda: ready(client, "pair"), "the machine", 120)
            assert (pair.limits["device"], pair.limits["devices"]) == ("cpu", 2)
            assert len(pair.capacity) == 2
            assert all(each.peer_bytes_per_s > 0 and each.memory_bytes == 600 * MIB for each in pair.capacity)
            job = {**JOB, "parallelism": {"stages": 1, "members_per_stage": 1, "tensor": 2}}
            weights, members = trained(client, wait_for, job)
            assert members == {pair.id}
            torch.testing.assert_close(weights, trained_in_one_process(tmp_path), atol=1e-5, rtol=0)
            assert host.stop() == 0


def agent_of(host: int, name: str) -> psutil.Process:
    """Return the agent of a device, a child of the host's process."""
    return next(child for child in psutil.Process(host).children() if name in title(child).split())


def raylet_of(host: int, name: str) -> psutil.Process:
    return descendants("raylet", agent_of(host, name).pid)[0]


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.skipif(os.geteuid() == 0 and landlock_version() > 0, reason="root lends no GPU")
def test_a_gpu_is_lent_measured_and_trains(
    server: Any, run_command: Any, wait_for: Any, tmp_path: Path
) -> None:
    lent = ("--name", "card", "--memory", "4GiB", "--cpu-threads", "1", "--device", "cuda:0", "--json")
    with server.client() as client:
        own = {
            "SHARE_COMPUTE_DATA_FOLDER": str(tmp_path),
            "SHARE_COMPUTE_INVITE": client.create_invite(label="card").code,
        }
        with run_command(tmp_path, "join", server.url, *lent, **own):
            machine = wait_for(lambda: ready(client, "card"), "the machine", 120)
            (device,) = machine.capacity
            properties = torch.cuda.get_device_properties(0)
            assert (device.kind, device.name, device.uuid) == ("cuda", properties.name, str(properties.uuid))
            assert device.memory_bytes == properties.total_memory
            job = {**JOB, "parallelism": {"stages": 1, "members_per_stage": 1}}
            weights, members = trained(client, wait_for, job)
            assert members == {machine.id}
            on_cpu = {name: tensor.cpu() for name, tensor in trained_in_one_process(tmp_path, "cuda").items()}
            torch.testing.assert_close(weights, on_cpu, atol=1e-5, rtol=0)
