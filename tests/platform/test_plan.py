"""Plans: who holds what and why, and what is missing when nobody can."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from share_compute.errors import PlanInfeasible, UserError
from share_compute.models.blueprint import Anatomy
from share_compute.planning.plan import Plan, make_plan
from share_compute.specification import TrainJob, parse_job
from share_compute.topology import Contributor, Device, DeviceKind, Topology

GIB = 2**30
ANATOMY = Anatomy(
    layers=(1_000_000,) * 12,
    embedding=2_000_000,
    head=2_000_000,
    hidden_size=256,
    intermediate_size=700,
    vocab_size=8000,
)


def machine(
    name: str, *, gflops: float = 50.0, memory_bytes: int = GIB, kind: DeviceKind = "cpu"
) -> Contributor:
    return Contributor(name, name, (Device(kind, kind, memory_bytes, {"float32": gflops * 1e9}),))


def job(*, microbatches: int = 4, **parallelism: Any) -> TrainJob:
    return parse_job(
        {
            "model": {"config": {"model_type": "llama"}},
            "data": {"files": ["a.txt"]},
            "training": {"microbatches": microbatches},
            "parallelism": parallelism,
        }
    )


def layers(plan: Plan) -> list[int]:
    return [pool.stop - pool.start for pool in plan.pools]


def test_layers_follow_measured_speed() -> None:
    topology = Topology(
        (machine("slow", gflops=20), machine("fast", gflops=60), machine("middle", gflops=40))
    )
    plan = make_plan(job(), topology, ANATOMY)
    assert [pool.members[0].name for pool in plan.pools] == ["slow", "fast", "middle"]
    assert layers(plan) == [2, 6, 4]
    assert plan.pools[1].members[0].reason == "6 of 12 layers: it measured 60 GFLOP/s"


def test_the_slowest_are_idle_when_fewer_pools_are_asked_for() -> None:
    topology = Topology((machine("a", gflops=1), machine("b", gflops=9), machine("c", gflops=5)))
    plan = make_plan(job(pools=2), topology, ANATOMY)
    assert plan.idle == ("a",)


def test_members_of_a_pool_share_its_microbatches() -> None:
    topology = Topology(tuple(machine(name) for name in "abcd"))
    plan = make_plan(job(pools=2, members_per_pool=2), topology, ANATOMY)
    assert plan.pool_sizes == [2, 2]
    for pool in plan.pools:
        assert [member.microbatches for member in pool.members] == [(0, 1), (2, 3)]


@given(
    st.lists(st.floats(0.1, 1000), min_size=1, max_size=9),
    st.sampled_from(["uniform", "memory_weighted", "compute_weighted"]),
)
def test_every_layer_is_held_exactly_once(speeds: list[float], strategy: str) -> None:
    topology = Topology(tuple(machine(f"m{index}", gflops=speed) for index, speed in enumerate(speeds)))
    plan = make_plan(job(strategy=strategy), topology, ANATOMY)
    held = [layer for pool in plan.pools for layer in range(pool.start, pool.stop)]
    assert held == list(range(12))
    assert sum(pool.parameters for pool in plan.pools) == ANATOMY.parameters


def test_missing_memory_is_said_in_bytes() -> None:
    topology = Topology((machine("a", memory_bytes=GIB // 64), machine("b", memory_bytes=GIB // 64)))
    with pytest.raises(PlanInfeasible, match="bytes are missing") as caught:
        make_plan(job(), topology, ANATOMY)
    details = caught.value.details
    assert details["missing_bytes"] == details["needed_bytes"] - details["lent_bytes"] > 0


def test_a_machine_that_is_too_small_for_its_share_is_named() -> None:
    topology = Topology((machine("large", memory_bytes=8 * GIB), machine("small", memory_bytes=GIB // 8)))
    with pytest.raises(PlanInfeasible, match="small lacks") as caught:
        make_plan(job(), topology, ANATOMY)
    assert caught.value.mend
    assert make_plan(job(strategy="memory_weighted"), topology, ANATOMY).pools[0].members[0].name == "large"


def test_too_few_machines_and_microbatches() -> None:
    topology = Topology((machine("a"), machine("b")))
    with pytest.raises(PlanInfeasible, match="3 pools of 1 need 3 machines; 2 are ready"):
        make_plan(job(pools=3), topology, ANATOMY)
    with pytest.raises(PlanInfeasible, match="cannot share 12 layers"):
        make_plan(job(pools=13), topology, ANATOMY)


def test_a_pool_does_not_mix_kinds_of_devices() -> None:
    topology = Topology((machine("a", gflops=99, kind="cuda"), machine("b"), machine("c")))
    with pytest.raises(PlanInfeasible, match="mix machines with and without GPU"):
        make_plan(job(pools=1, members_per_pool=2), topology, ANATOMY)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(UserError, match="no parameters"):
        make_plan(job(), Topology((machine("a"),)), Anatomy(layers=(0,), embedding=0, head=0))


def test_a_gpu_counts_alone() -> None:
    both = Contributor(
        "a",
        "a",
        (
            Device("cpu", "cpu", 64 * GIB, {"float32": 1e11}),
            Device("cuda", "gpu", 8 * GIB, {"float32": 1e13}),
        ),
    )
    assert both.memory_bytes == 8 * GIB
    assert both.flops_per_s() == 1e13
