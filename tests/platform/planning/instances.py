"""Seeded small planning problems: unequal machines, scarce memory, regions, dead links."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import get_args

import numpy as np

from share_compute.device_kinds import DeviceKind
from share_compute.models.profiles.profile import LayerProfile, ModelProfile, QuadraticGrowth
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.timings import LayerTiming
from share_compute.planning.network.network import Network
from share_compute.specification.workload import TrainingWorkload
from share_compute.topology import Contributor, Device, Topology

KINDS = get_args(DeviceKind)


def instance(seed: int, *, machines: int, layers: int, microbatches: int | None = None) -> TrainingCost:
    """Return the problem of a seed."""
    draw = random.Random(seed)
    count = draw.choice((1, 2, 3, 4, 6, 8, 12, 16)) if microbatches is None else microbatches
    profile = _profile(draw, layers)
    workload = TrainingWorkload(count * draw.choice((1, 2)), count, 8, draw.randrange(3))
    regions = draw.randrange(1, min(machines, 3) + 1)
    state = profile.parameters * 4 * (2 + workload.optimizer_tensors)
    scarce = draw.random() < 0.5
    topology = Topology(
        tuple(_machine(draw, index, state if scarce else 100 * state) for index in range(machines))
    )
    timings = {}
    if draw.random() < 0.2:
        timings = {"c0": {draw.randrange(layers): LayerTiming(draw.uniform(0.1, 2), draw.uniform(0.1, 2))}}
    return TrainingCost(profile, topology, _network(draw, machines, regions), workload, timings)


def with_overhead(cost: TrainingCost) -> TrainingCost:
    """Return the problem with an overhead per operation on every other machine."""
    machines = tuple(
        replace(
            machine,
            devices=tuple(
                replace(device, overhead_s=1e-3 * (index % 2) / (device.flops_per_s["float32"] or 1.0))
                for device in machine.devices
            ),
        )
        for index, machine in enumerate(cost.topology.contributors)
    )
    return replace(cost, topology=replace(cost.topology, contributors=machines))


def with_backups(cost: TrainingCost) -> TrainingCost:
    """Return the problem with backups: a stage of one member sends its gradient to another machine, too."""
    return replace(cost, workload=replace(cost.workload, backups=True))


def sparing(cost: TrainingCost) -> TrainingCost:
    """Return the problem with less memory: some layers frozen, activation checkpointing, bfloat16."""
    layers = tuple(
        layer.model_copy(update={"frozen": layer.parameters if place % 3 == 0 else layer.parameters // 2})
        for place, layer in enumerate(cost.profile.layers)
    )
    embedding = cost.profile.embedding.model_copy(update={"frozen": cost.profile.embedding.parameters})
    return replace(
        cost,
        profile=cost.profile.model_copy(
            update={"layers": layers, "embedding": embedding, "tied_trains": False}
        ),
        workload=replace(cost.workload, dtype="bfloat16", activation_checkpointing=True),
    )


def _profile(draw: random.Random, layers: int) -> ModelProfile:
    even = draw.random() < 0.4

    def layer(scale: float) -> LayerProfile:
        size = 1.0 if even else draw.uniform(0.3, 2)
        return LayerProfile(
            parameters=int(1e6 * size * scale),
            forward_flops=QuadraticGrowth(linear=size * scale),
            backward_flops=QuadraticGrowth(linear=2 * size * scale),
            forward_operations=int(40 * scale),
            backward_operations=int(80 * scale),
            largest=int(2e5 * size * scale),
            activation_bytes=QuadraticGrowth(linear=1e5 * size),
            boundary_numbers=QuadraticGrowth(linear=1e4 if even else draw.uniform(0, 2e4)),
        )

    return ModelProfile(
        layers=tuple(layer(1) for _ in range(layers)),
        embedding=layer(0.3),
        head=layer(0.3),
        tied=draw.choice((0, 300_000)),
    )


def _machine(draw: random.Random, index: int, state: int) -> Contributor:
    speed = draw.choice((1.0, 2.0, 4.0, draw.uniform(1, 8)))
    kind = KINDS[draw.random() < 0.2]
    device = Device(
        kind=kind,
        name=kind,
        memory_bytes=int(state * draw.uniform(0.2, 1.5)),
        flops_per_s={"float32": 0.0 if draw.random() < 0.03 else speed},
        memory_bytes_per_s=draw.choice((0.0, 2e7 * speed)),
    )
    return Contributor(id=f"c{index}", name=f"machine {index}", devices=(device,))


def _network(draw: random.Random, machines: int, regions: int) -> Network:
    latency, rate = np.zeros((regions, regions)), np.zeros((regions, regions))
    scale = 10 ** draw.uniform(-3, 1)
    for row in range(regions):
        for column in range(row, regions):
            near = row == column
            latency[row, column] = latency[column, row] = scale * draw.uniform(0.1, 1) * (0.1 if near else 1)
            dead = draw.random() < 0.08
            speed = 0.0 if dead else 1e6 / scale * draw.uniform(0.1, 1) * (10 if near else 1)
            rate[row, column] = rate[column, row] = speed
    return Network(np.array([draw.randrange(regions) for _ in range(machines)]), latency, rate)
