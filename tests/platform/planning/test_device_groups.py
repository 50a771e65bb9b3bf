"""Plans on machines whose owner lends several devices together: one member computes on all of them with tensor."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tests.platform.planning.models import GIB, PROFILE, job, lan, machine, make_plan

from share_compute.device_kinds import DeviceKind
from share_compute.errors import PlanInfeasible
from share_compute.files.topology_file import describe_topology, read_topology, write_topology
from share_compute.planning.cost.tables import MEMORY_SHARE
from share_compute.planning.dry_run import dry_run
from share_compute.planning.network.regions import complete
from share_compute.planning.operators.plan import group_on
from share_compute.planning.serving.cost import ServingCost
from share_compute.planning.serving.plan import plan_serving
from share_compute.specification.workload import ServingWorkload
from share_compute.topology import Contributor, Topology


def together(name: str, *gflops: float, peer_bytes_per_s: float = 0.0, latency_s: float = 0.0) -> Contributor:
    """Return a machine with CPU devices of these speeds, which are lent together, each with 8 GiB and 2 threads."""
    alone = [machine(name, each, memory_bytes=8 * GIB).device for each in gflops]
    devices = tuple(
        replace(each, peer_bytes_per_s=peer_bytes_per_s, peer_latency_s=latency_s) for each in alone
    )
    return Contributor(name, name, devices, cpu_threads=2 * len(devices))


def test_a_member_has_the_devices_of_its_ranks() -> None:
    ada = together("ada", 50, 40, 90)
    pair = replace(ada, ranks=2)
    assert (ada.flops_per_s(), ada.memory_bytes, ada.threads) == (50e9, 8 * GIB, 2)
    assert (pair.flops_per_s(), pair.memory_bytes, pair.threads) == (80e9, 16 * GIB, 4)
    assert pair.memory_bytes_per_s == 2 * ada.memory_bytes_per_s
    assert ada.most_ranks == 3
    assert pair.with_memory(GIB).memory_bytes == GIB
    assert [each.memory_bytes for each in pair.with_memory(GIB).devices] == [GIB // 2, GIB // 2, 8 * GIB]


def test_without_tensor_a_job_uses_the_first_device() -> None:
    first = make_plan(job(), lan(machine("ada", 50, memory_bytes=8 * GIB)), PROFILE)
    plan = make_plan(job(), lan(together("ada", 50, 50)), PROFILE)
    assert plan.prediction == first.prediction
    (member,) = plan.stages[0].members
    assert member.lent_bytes == 8 * GIB
    assert member.reason.endswith(", on 1 of its 2 devices")


def test_with_tensor_a_job_uses_as_many_devices_and_their_sums_take_time() -> None:
    steps_s = []
    for bytes_per_s, latency_s in ((0.0, 0.0), (1e9, 1e-6), (1e8, 1e-3)):
        machines = lan(together("ada", 50, 50, peer_bytes_per_s=bytes_per_s, latency_s=latency_s))
        plan = make_plan(job(tensor=2), machines, PROFILE)
        assert plan.prediction is not None
        assert plan.stages[0].members[0].lent_bytes == 16 * GIB
        assert plan.stages[0].members[0].reason.endswith(", on 2 of its 2 devices")
        steps_s.append(plan.prediction.step_s)
    double = make_plan(job(tensor=2), lan(machine("ada", 100, memory_bytes_per_s=4e10)), PROFILE)
    assert double.prediction is not None
    assert steps_s[0] == pytest.approx(double.prediction.step_s)
    assert steps_s == sorted(set(steps_s))


def test_requests_wait_for_sums_between_devices() -> None:
    work = ServingWorkload(ranks=2)
    found = [
        plan_serving("m", lan(together("ada", 50, 50, peer_bytes_per_s=rate)), PROFILE, work)
        for rate in (1e12, 1e7)
    ]
    assert found[0].first_token_s < found[1].first_token_s
    assert found[0].next_token_s < found[1].next_token_s


@pytest.mark.parametrize(("kind", "copies"), [("cpu", 0), ("cuda", 1)])
def test_ranks_on_gpus_each_have_the_embedding(kind: DeviceKind, copies: int) -> None:
    one = machine("ada", kind=kind, memory_bytes=2 * GIB)
    machines = lan(replace(one, devices=one.devices * 2, ranks=2))
    cost = ServingCost(PROFILE, machines, complete(machines), ServingWorkload(ranks=2))
    embedding_bytes = 4 * PROFILE.embedding.parameters
    assert cost.memory_bytes[0] == pytest.approx(MEMORY_SHARE * 4 * GIB - copies * embedding_bytes)


def test_machines_with_too_few_devices_are_left_out_with_the_reason() -> None:
    report = dry_run(job(tensor=3), lan(together("ada", 50, 50), together("bob", 50, 50, 50)), PROFILE)
    assert report.plan.machines == {"bob"}
    assert {idle.name: idle.reason for idle in report.plan.idle} == {
        "ada": "too small: it can run 2 of the 3 ranks of parallelism.tensor"
    }


def gpus(memory_bytes: int, peer_bytes_per_s: float = 0.0) -> Contributor:
    """Return a machine with two GPUs that are lent together."""
    gpu = machine("ada", 500, kind="cuda", memory_bytes=memory_bytes)
    return replace(gpu, devices=(replace(gpu.device, peer_bytes_per_s=peer_bytes_per_s),) * 2, cpu_threads=4)


def test_a_member_that_trains_fits_into_the_memory_of_one_gpu() -> None:
    """The first GPU has all parameters, gradients and the optimizer's state."""
    both = dry_run(job(tensor=2), lan(gpus(8 * GIB)), PROFILE, serving=ServingWorkload(ranks=2))
    (member,) = both.plan.stages[0].members
    assert member.lent_bytes == 8 * GIB
    assert member.reason.endswith(" of 8.0 GiB used, on 2 of its 2 devices")
    assert both.serving is not None
    assert both.serving.plan.stages[0].members[0].lent_bytes == 16 * GIB
    needed = member.memory_bytes
    together_bytes = math.ceil(needed / MEMORY_SHARE / 2)
    with pytest.raises(PlanInfeasible, match="memory"):
        make_plan(job(tensor=2, stages=1), lan(gpus(together_bytes)), PROFILE)
    make_plan(job(tensor=2, stages=1), lan(gpus(2 * together_bytes)), PROFILE)


def test_less_memory_is_that_of_each_gpu() -> None:
    pair = replace(gpus(8 * GIB), ranks=2, is_training=True)
    assert pair.with_memory(GIB).memory_bytes == GIB
    assert [each.memory_bytes for each in pair.with_memory(GIB).devices] == [GIB, GIB]


def test_gpus_exchange_parts_of_parameters_and_gradients() -> None:
    """Parts of a CPU share them in main memory."""
    steps_s = []
    for kind in ("cuda", "cpu"):
        pair = gpus(8 * GIB, peer_bytes_per_s=1e9)
        devices = tuple(replace(each, kind=kind) for each in pair.devices)
        plan = make_plan(job(tensor=2, stages=1), lan(replace(pair, devices=devices)), PROFILE)
        assert plan.prediction is not None
        steps_s.append(plan.prediction.step_s)
    trained = sum(layer.parameters - layer.frozen for layer in PROFILE.layers)
    once_s = 4 * trained / 1e9 / 2  # half of the time of a sum
    assert steps_s[0] - steps_s[1] == pytest.approx(
        (4 + 1) * once_s, rel=1e-3
    )  # 4 microbatches, and parameters


def test_plans_of_operators_use_the_link_between_the_devices() -> None:
    ada = together("ada", 50, 40, peer_bytes_per_s=3e9, latency_s=2e-5)
    name, group, is_assumed = group_on(Topology((ada,)), 2)
    assert (name, group.devices, group.flops_per_s, is_assumed) == ("ada", 2, 40e9, False)
    assert (group.link_bytes_per_s, group.link_latency_s) == (3e9, 2e-5)


def test_devices_that_are_lent_together_travel_with_topology_files() -> None:
    ada = together("ada", 50, 40, peer_bytes_per_s=3e9, latency_s=2e-5)
    (again,) = read_topology(write_topology(describe_topology(Topology((ada,))))).contributors
    assert again.devices == ada.devices
