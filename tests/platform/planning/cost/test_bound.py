"""The lower bound: never above a possible step time, and equal to it where nothing was relaxed."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from tests.platform.planning.instances import instance, sparing, with_overhead
from tests.thoroughly import thoroughly

from share_compute.models.profiles.profile import LayerProfile, ModelProfile, QuadraticGrowth
from share_compute.planning.cost.bound import lower_bound_s
from share_compute.planning.cost.layout import solo
from share_compute.planning.network.network import Network
from share_compute.planning.search.search import search
from share_compute.specification.workload import TrainingWorkload


@pytest.mark.parametrize("seed", thoroughly(range(30), quick=10))
def test_never_above_the_best_plan_of_eight_machines(seed: int) -> None:
    plain = instance(seed, machines=8, layers=12)
    for cost in (plain, with_overhead(plain), sparing(plain)):
        found = search(cost)
        assert not found or 0 < lower_bound_s(cost) <= found[0].step_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_of_one_machine_it_is_what_the_machine_takes(seed: int) -> None:
    cost = instance(seed, machines=1, layers=5)
    alone = solo(0, 5, cost.workload.microbatches)
    if cost.fits(alone) and math.isfinite(cost.forward_s[0, -1]):
        assert lower_bound_s(cost) == cost.step_s(alone)
    else:
        assert lower_bound_s(cost) == math.inf


def test_equal_to_the_best_plan_where_work_can_be_shared_perfectly() -> None:
    base = instance(0, machines=4, layers=4, microbatches=8)
    machine = base.topology.contributors[0]
    device = dataclasses.replace(
        machine.devices[0], memory_bytes=10**12, flops_per_s={"float32": 1.0}, memory_bytes_per_s=0.0
    )
    cost = dataclasses.replace(
        base,
        profile=ModelProfile(
            layers=(
                LayerProfile(
                    parameters=0, forward_flops=QuadraticGrowth(1.0), backward_flops=QuadraticGrowth(2.0)
                ),
            )
            * 4
        ),
        topology=type(base.topology)(
            tuple(dataclasses.replace(machine, id=f"c{index}", devices=(device,)) for index in range(4))
        ),
        network=Network(np.zeros(4, dtype=np.int64), np.zeros((1, 1)), np.full((1, 1), 1e9)),
        workload=TrainingWorkload(8, 8),
        timings={},
    )
    # 8 microbatches x 4 layers x 3 s over 4 machines.
    assert lower_bound_s(cost) == pytest.approx(24.0)
    assert search(cost)[0].step_s == pytest.approx(24.0)


def test_a_slow_link_counts_where_a_machine_cannot_hold_the_model() -> None:
    cost = instance(4, machines=2, layers=4, microbatches=2)
    needed = cost.parameters[-1] * 4 * (2 + cost.workload.optimizer_tensors)
    contributors = tuple(
        dataclasses.replace(
            machine,
            devices=(
                dataclasses.replace(
                    machine.devices[0], memory_bytes=int(needed), flops_per_s={"float32": 2.0}
                ),
            ),
        )
        for machine in cost.topology.contributors
    )
    slow = dataclasses.replace(
        cost,
        topology=type(cost.topology)(contributors),
        network=Network(np.array([0, 1]), np.full((2, 2), 1000.0), np.full((2, 2), 1e9)),
    )
    assert lower_bound_s(slow) > 2000.0
    cut = dataclasses.replace(slow, network=Network(np.array([0, 1]), np.zeros((2, 2)), np.zeros((2, 2))))
    assert lower_bound_s(cut) == math.inf
    assert search(cut) == []
