"""A small model profile, machines and jobs that the tests of plans share."""

from __future__ import annotations

from typing import Any

from share_compute.device_kinds import DeviceKind
from share_compute.models.profiles.profile import LayerProfile, ModelProfile, QuadraticGrowth
from share_compute.planning.plan import Plan
from share_compute.planning.planner import solve
from share_compute.specification import TrainJob, parse_job
from share_compute.topology import Contributor, Device, Link, Topology

GIB = 2**30
LAYER = LayerProfile(
    parameters=12_000_000,
    forward_flops=QuadraticGrowth(linear=24e6),
    backward_flops=QuadraticGrowth(linear=48e6),
    activation_bytes=QuadraticGrowth(linear=160e3),
    boundary_numbers=QuadraticGrowth(linear=1024),
)
PROFILE = ModelProfile(
    layers=(LAYER,) * 12,
    embedding=LayerProfile(parameters=8_000_000),
    head=LayerProfile(
        parameters=8_000_000,
        forward_flops=QuadraticGrowth(linear=16e6),
        backward_flops=QuadraticGrowth(linear=32e6),
    ),
)


def machine(
    name: str,
    gflops: float = 50.0,
    *,
    memory_bytes: int = 8 * GIB,
    kind: DeviceKind = "cpu",
    memory_bytes_per_s: float = 2e10,
) -> Contributor:
    device = Device(kind, kind, memory_bytes, {"float32": gflops * 1e9}, memory_bytes_per_s)
    return Contributor(name, name, (device,))


def lan(*machines: Contributor, latency_s: float = 5e-4, bytes_per_s: float = 1e8) -> Topology:
    """Return machines with equal links between all of them."""
    links = [
        Link(one.id, other.id, latency_s, bytes_per_s)
        for place, one in enumerate(machines)
        for other in machines[place + 1 :]
    ]
    return Topology(machines, tuple(links))


def job(
    *, microbatches: int | None = 4, training: dict[str, Any] | None = None, **parallelism: Any
) -> TrainJob:
    return parse_job(
        {
            "model": {"config": {"model_type": "llama"}},
            "data": {"files": ["a.txt"]},
            "training": {"microbatches": microbatches, **(training or {})},
            "parallelism": parallelism,
        }
    )


def make_plan(spec: TrainJob, topology: Topology, profile: ModelProfile) -> Plan:
    """Return the plan of a job at epoch 0, on machines whose layers were not timed."""
    return solve(spec, topology, profile, 0, {}).plan
