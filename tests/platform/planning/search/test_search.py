"""The search: equal to brute force where that is possible, never worse than simple layouts, and with valid results."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest
from tests.platform.planning.instances import instance, with_backups, with_overhead
from tests.platform.planning.search.brute_force import best, can_hold_a_layer
from tests.thoroughly import thoroughly

from share_compute.planning.cost.bound import lower_bound_s
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.network.network import Network
from share_compute.planning.search.labels import BETTER
from share_compute.planning.search.orders import orders, simple_layouts
from share_compute.planning.search.search import Found, search
from share_compute.specification.workload import TrainingWorkload
from share_compute.topology import Contributor, Device, Topology

METHODS: tuple[Literal["auto", "dynamic_programming", "recursive"], ...] = (
    "auto",
    "dynamic_programming",
    "recursive",
)


def small(seed: int) -> TrainingCost:
    """Return an instance that brute force can go through: up to 6 machines x 8 layers, a ninth of them just that."""
    draw = random.Random(seed)
    machines, layers = (6, 8) if seed % 9 == 0 else (draw.randint(1, 6), draw.randint(1, 8))
    return instance(seed, machines=machines, layers=layers)


def is_best(found: list[Found], smallest: float) -> bool:
    """Return whether a search found the smallest step.

    Not always its last bit: to the search, a step is smaller than another when it is so by more than rounding.
    """
    step_s = found[0].step_s if found else math.inf
    return smallest <= step_s and step_s * BETTER <= smallest


def check(cost: TrainingCost, found: list[Found]) -> None:
    """Assert the properties of every result."""
    assert [each.step_s for each in found] == sorted(each.step_s for each in found)
    assert len({each.layout for each in found}) == len(found)
    for each in found:
        stages = each.layout.stages
        assert math.isfinite(each.step_s)
        assert each.step_s == cost.step_s(each.layout)
        assert cost.may_fit(each.layout)
        assert stages[0].start == 0
        assert stages[-1].stop == cost.num_layers
        assert all(left.stop == right.start for left, right in pairwise(stages))
        assert all(stage.start < stage.stop for stage in stages)
        assert len(set(each.layout.machines)) == len(each.layout.machines)
        for stage in stages:
            assert cost.may_share(stage.members)
            assert sum(stage.shares) == cost.workload.microbatches
            assert min(stage.shares) >= 1


@pytest.mark.parametrize("block", thoroughly(range(11), quick=4))
def test_equal_to_brute_force_over_all_layouts_and_over_one_order(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        cost = small(seed)
        found = search(cost)
        check(cost, found)
        smallest, layout = best(cost)
        assert layout is None or (cost.may_fit(layout) and cost.step_s(layout) == smallest), seed
        assert is_best(found, smallest), seed
        assert all(each.exact == (index == 0) for index, each in enumerate(found)), seed
        able = [machine for machine in range(cost.num_machines) if can_hold_a_layer(cost, machine)]
        in_order, _ = best(cost, order=able)
        row = search(cost, method="dynamic_programming")
        check(cost, row)
        assert is_best(row, in_order), seed
        assert lower_bound_s(cost) <= smallest * (1 + 1e-9), seed


@pytest.mark.parametrize("change", [with_overhead, with_backups])
def test_equal_to_brute_force_where_more_takes_its_time(
    change: Callable[[TrainingCost], TrainingCost],
) -> None:
    for seed in range(30):
        cost = change(small(seed))
        found, (smallest, _) = search(cost), best(cost)
        check(cost, found)
        # Times that are not whole numbers have sums with different last bits where layouts are equally fast.
        assert (found[0].step_s if found else math.inf) == pytest.approx(smallest, rel=1e-12), seed


@pytest.mark.parametrize("seed", thoroughly(range(40), quick=12))
def test_as_many_stages_and_members_as_requested(seed: int) -> None:
    cost = small(seed)
    for stages, members in ((2, None), (None, 1), (2, 1), (None, 2), (3, None), (1, 2)):
        found = search(cost, stages=stages, members_per_stage=members)
        check(cost, found)
        smallest, _ = best(cost, stages=stages, members_per_stage=members)
        assert is_best(found, smallest)
        for each in found:
            assert stages is None or len(each.layout.stages) == stages
            assert members is None or {len(stage.members) for stage in each.layout.stages} == {members}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_deterministic(seed: int, method: Literal["auto", "dynamic_programming", "recursive"]) -> None:
    first = search(instance(seed, machines=13, layers=6), method=method)
    check(instance(seed, machines=13, layers=6), first)
    assert search(instance(seed, machines=13, layers=6), method=method) == first


@pytest.mark.parametrize("seed", thoroughly(range(12), quick=4))
def test_another_machine_never_makes_the_plan_slower(seed: int) -> None:
    cost = instance(seed, machines=7, layers=10)
    times = []
    for count in range(1, 8):
        fewer = dataclasses.replace(
            cost,
            topology=Topology(cost.topology.contributors[:count]),
            network=dataclasses.replace(cost.network, region=cost.network.region[:count]),
        )
        found = search(fewer)
        assert not found or found[0].exact
        times.append(found[0].step_s if found else math.inf)
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("seed", thoroughly(range(12), quick=4))
def test_twice_the_speed_of_everything_is_half_the_time(seed: int) -> None:
    cost = with_overhead(dataclasses.replace(instance(seed, machines=6, layers=8), timings={}))

    def doubled(machine: Contributor) -> Contributor:
        device = machine.devices[0]
        rates = {dtype: 2 * rate for dtype, rate in device.flops_per_s.items()}
        faster = dataclasses.replace(
            device,
            flops_per_s=rates,
            memory_bytes_per_s=2 * device.memory_bytes_per_s,
            overhead_s=device.overhead_s / 2,
        )
        return dataclasses.replace(machine, devices=(faster,))

    twice = dataclasses.replace(
        cost,
        topology=Topology(tuple(doubled(machine) for machine in cost.topology.contributors)),
        network=Network(cost.network.region, cost.network.latency_s / 2, cost.network.bytes_per_s * 2),
    )
    before, after = search(cost), search(twice)
    assert len(before) == len(after)
    assert [each.step_s / 2 for each in before[:1]] == pytest.approx([each.step_s for each in after[:1]])
    assert lower_bound_s(twice) == pytest.approx(lower_bound_s(cost) / 2)


@pytest.mark.parametrize("seed", thoroughly(range(5), quick=2))
def test_no_slower_than_any_simple_layout_on_more_machines(seed: int) -> None:
    cost = instance(seed, machines=14, layers=8)
    found = search(cost)
    check(cost, found)
    rates = dict.fromkeys(range(14), 1.0)
    usable = {machine: 1.0 for machine in rates if np.isfinite(cost.forward_s[machine, -1])}
    simple = [
        cost.step_s(layout)
        for order in orders(cost, usable)
        for layout in simple_layouts(cost, order, usable)
        if cost.fits(layout)
    ]
    assert min(simple, default=math.inf) >= (found[0].step_s if found else math.inf)
    assert not found or found[0].step_s >= lower_bound_s(cost) * (1 - 1e-9)


def test_finalists_differ_in_the_number_of_stages() -> None:
    cost = instance(12, machines=8, layers=12, microbatches=8)
    found = search(cost, finalists=6)
    assert 1 < len(found) <= 6
    assert len({len(each.layout.stages) for each in found}) > 1


def fleet(
    *speeds: float, memory_bytes: int = 10**15, region: tuple[int, ...] = (), rate: float = 1e9
) -> TrainingCost:
    """Return 4 equal layers on machines of these speeds; regions are joined by links of ``rate`` bytes/s."""
    base = instance(3, machines=1, layers=4, microbatches=4)
    layers = (base.profile.layers[0],) * 4
    count = max(region, default=0) + 1
    return TrainingCost(
        base.profile.model_copy(update={"layers": layers}),
        Topology(
            tuple(
                Contributor(str(at), str(at), (Device("cpu", "cpu", memory_bytes, {"float32": speed}),))
                for at, speed in enumerate(speeds)
            )
        ),
        Network(
            np.array(region or [0] * len(speeds), dtype=np.int64),
            np.zeros((count, count)),
            np.where(np.eye(count) > 0, 1e9, rate),
        ),
        TrainingWorkload(4, 4),
    )


def test_zero_machines() -> None:
    cost = fleet()
    assert search(cost) == []
    assert lower_bound_s(cost) == math.inf


@pytest.mark.parametrize("method", METHODS)
def test_machines_without_speed_or_memory_hold_nothing(
    method: Literal["auto", "dynamic_programming", "recursive"],
) -> None:
    assert search(fleet(0.0, 0.0), method=method) == []
    assert search(fleet(math.nan, math.inf, -1.0), method=method) == []
    assert search(fleet(1.0, 1.0, memory_bytes=0), method=method) == []
    found = search(fleet(0.0, 2.0, math.nan), method=method)
    assert found[0].layout == Layout((StageLayout(0, 4, (1,), (4,)),))


def test_what_fits_nowhere_is_not_found() -> None:
    assert search(fleet(1.0, 1.0, memory_bytes=1000)) == []


def test_regions_that_nothing_joins_are_planned_apart() -> None:
    cost = fleet(1.0, 4.0, 4.0, 1.0, region=(0, 1, 1, 0), rate=0.0)
    found = search(cost)
    check(cost, found)
    assert set(found[0].layout.machines) == {1, 2}
    assert found[0].exact


def test_one_machine_alone_wins_over_a_slow_link() -> None:
    found = search(fleet(2.0, 2.0, region=(0, 1), rate=1e-3))
    assert [stage.members for stage in found[0].layout.stages] == [(0,)]


def test_one_layer_is_shared_by_members_of_one_stage() -> None:
    cost = fleet(1.0, 1.0)
    single = dataclasses.replace(
        cost, profile=cost.profile.model_copy(update={"layers": cost.profile.layers[:1]})
    )
    found = search(single)
    check(single, found)
    assert found[0].layout.stages == (StageLayout(0, 1, (0, 1), (2, 2)),)


def test_more_stages_than_layers_or_members_than_microbatches_are_not_found() -> None:
    cost = fleet(*[1.0] * 6)
    assert search(cost, stages=5) == []
    assert search(cost, members_per_stage=5) == []
    assert search(cost, stages=4, members_per_stage=2) == []


@pytest.mark.thorough
def test_ten_thousand_machines_do_not_explode() -> None:
    draw = random.Random(0)
    cost = fleet(*[draw.uniform(1, 8) for _ in range(10_000)], region=tuple(range(20)) * 500)
    found = search(cost)
    check(cost, found)
    assert found[0].step_s >= lower_bound_s(cost) * (1 - 1e-9)


def test_a_machine_that_holds_the_model_alone_is_found_among_many_that_hold_nothing() -> None:
    cost = instance(3, machines=2, layers=6, microbatches=4)
    one = cost.topology.contributors[0]

    def like(index: int, memory_bytes: int, speed: float) -> Contributor:
        device = dataclasses.replace(
            one.devices[0], memory_bytes=memory_bytes, flops_per_s={"float32": speed}, memory_bytes_per_s=0.0
        )
        return dataclasses.replace(one, id=f"c{index}", devices=(device,))

    whole = int(cost.bytes_needed(0, 6, 4, 4))
    machines = (*(like(index, 1000, 9.0) for index in range(220)), like(220, 2 * whole, 1.0))
    many = dataclasses.replace(
        cost, topology=Topology(machines), network=Network.alike(len(machines)), timings={}
    )
    found = search(many)
    assert found[0].layout.machines == (220,)
    assert found[0].step_s == pytest.approx(lower_bound_s(many))


@pytest.mark.parametrize("seed", [2, 5])
def test_single_machine_stages_are_among_the_finalists(seed: int) -> None:
    cost = instance(seed, machines=9, layers=8, microbatches=8)
    found, single = search(cost, finalists=16), search(cost, members_per_stage=1)
    assert bool(found) == bool(single)
    if single and single[0].step_s <= 2 * found[0].step_s:
        assert single[0].step_s in [each.step_s for each in found]
