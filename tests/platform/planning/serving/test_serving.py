"""Serving: the formula by hand, and the search against all layouts."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations
from typing import Literal

import numpy as np
import pytest

from share_compute.errors import PlanInfeasible
from share_compute.models.profiles.profile import LayerProfile, ModelProfile, QuadraticGrowth
from share_compute.planning.cost.layout import Layout, StageLayout, solo
from share_compute.planning.cost.timings import LayerTiming
from share_compute.planning.network.network import Network
from share_compute.planning.serving.cost import ServingCost
from share_compute.planning.serving.plan import plan_serving
from share_compute.planning.serving.search import search_serving
from share_compute.specification.workload import ServingWorkload
from share_compute.topology import Contributor, Device, Topology

Objective = Literal["latency", "throughput"]


def machine(
    index: int,
    speed: float,
    memory_bytes: int = 10**15,
    memory_rate: float = 0.0,
    overhead_s: float = 0.0,
) -> Contributor:
    device = Device("cpu", "cpu", memory_bytes, {"float32": speed}, memory_rate, overhead_s)
    return Contributor(id=f"c{index}", name=f"c{index}", devices=(device,))


def network(count: int, latency_s: float, bytes_per_s: float) -> Network:
    return Network(np.zeros(count, dtype=np.int64), np.array([[latency_s]]), np.array([[bytes_per_s]]))


def row(*stages: tuple[int, int, int]) -> Layout:
    return Layout(tuple(StageLayout(start, stop, (member,), (1,)) for member, start, stop in stages))


LAYER = LayerProfile(
    parameters=250,
    forward_flops=QuadraticGrowth(linear=1.0),
    boundary_numbers=QuadraticGrowth(linear=25.0),
    cache_numbers=QuadraticGrowth(linear=5.0),
)
TWO = ServingCost(
    ModelProfile(layers=(LAYER, LAYER)),
    Topology((machine(0, 1.0, memory_rate=1000.0), machine(1, 2.0, memory_rate=500.0))),
    network(2, 0.5, 100.0),
    ServingWorkload(prompt_tokens=10, new_tokens=4, concurrent=4),
)


def test_a_model_that_cannot_be_cut_is_served_by_one_machine() -> None:
    whole = ModelProfile(layers=(LAYER, LAYER), no_cut_reason="its layers share a state")
    found = plan_serving("m", TWO.topology, whole, TWO.workload)
    assert len(found.plan.stages) == 1
    with pytest.raises(PlanInfeasible, match="cannot be cut into 2 stages: its layers share a state"):
        plan_serving("m", TWO.topology, whole, TWO.workload, stages=2)
    lean = Topology((machine(0, 1.0, memory_bytes=2000), machine(1, 1.0, memory_bytes=2000)))
    with pytest.raises(PlanInfeasible, match="which cannot be cut: its layers share a state"):
        plan_serving("m", lean, whole, TWO.workload)


def test_the_formula_by_hand() -> None:
    split = row((0, 0, 1), (1, 1, 2))
    # Prompt: 10 s of operations on the first, 5 s on the second; its weights take 1 and 2 s. The hop is 0.5 + 1000/100.
    assert TWO.first_token_s(split) == 10 + 10.5 + 5
    # One token: 1 s of operations on the first; 1000 bytes of weights + 5 numbers * 12 tokens * 4 bytes of cache:
    # 1.24 s on the first and 2.48 s on the second. The hop is 0.5 + 100 / 100, the way back 0.5 + 8 / 100.
    assert TWO.next_token_s(split) == pytest.approx(1.24 + 1.5 + 2.48 + 0.58)
    # Loaded: two batches of two: 2 s of operations (memory: 1.48), 2.96 s of memory; the hop 0.5 + 2, back 0.66.
    steps = 2 + 2 * 10 / 4, 2.96 + 2 * 5 / 4, 2 * 100 * (1 + 10 / 4) / 100
    assert TWO.next_token_s(split, loaded=True) == pytest.approx(max(2 + 2.5 + 2.96 + 0.66, 2 * max(steps)))
    assert TWO.tokens_per_s(split) == pytest.approx(4 / 14)
    assert TWO.first_token_s(solo(1, 2, 1)) == 10.0


def test_memory_is_weights_cache_and_the_widest_layer() -> None:
    wide = LAYER.model_copy(update={"activation_bytes": QuadraticGrowth(linear=7.0)})
    profile = ModelProfile(
        layers=(wide, LAYER),
        embedding=LayerProfile(parameters=1000),
        head=LayerProfile(parameters=10),
        tied=1000,
    )
    cost = replace(TWO, profile=profile)
    cache = 5 * 14 * 4 * 4
    assert cost.needed_bytes[0, 1] == 4 * 1250 + cache + 70
    assert cost.needed_bytes[1, 2] == 4 * (250 + 10 + 1000) + cache
    assert cost.needed_bytes[0, 2] == 4 * (500 + 1000 + 10) + 2 * cache + 70
    halved = replace(cost, workload=replace(cost.workload, dtype="bfloat16"))
    assert halved.needed_bytes[0, 2] == cost.needed_bytes[0, 2] / 2
    integers = replace(cost, workload=replace(cost.workload, dtype="int8"))
    assert integers.needed_bytes[0, 2] == 500 + 4 * 1000 + 10 + 2 * cache + 70, (
        "what is looked up stays float32"
    )
    assert integers.needed_bytes[1, 2] == 250 + 10 + 4 * 1000 + cache, "so does the copy of it"


@pytest.mark.parametrize(("cached", "numbers"), [(5.0, 7 * 512 + 512 * 2050), (0.0, 7 * 2048)])
def test_a_long_prompt_is_computed_in_chunks_by_decoders_only(cached: float, numbers: int) -> None:
    layer = LAYER.model_copy(
        update={
            "activation_bytes": QuadraticGrowth(linear=4.0 * 7),
            "cache_numbers": QuadraticGrowth(linear=cached),
        }
    )
    workload = ServingWorkload(prompt_tokens=2048, new_tokens=2, concurrent=0)
    cost = replace(TWO, profile=ModelProfile(layers=(layer, layer)), workload=workload)
    assert cost.needed_bytes[0, 1] == 4 * (250 + numbers)


def test_measured_layers_replace_estimates_and_scale_the_others() -> None:
    timed = replace(TWO, timings={"c0": {0: LayerTiming(20.0, 0.0)}})
    assert timed.first_token_s(solo(0, 2, 1)) == 40.0
    # The other machine was not timed: its estimate is assumed to be wrong by the same factor.
    assert timed.first_token_s(solo(1, 2, 1)) == 20.0
    for machine in (0, 1):
        alone = solo(machine, 2, 1)
        assert timed.next_token_s(alone) == pytest.approx(2 * TWO.next_token_s(alone))


def test_operations_take_their_time_however_small_they_are() -> None:
    layer = LAYER.model_copy(update={"forward_operations": 3})
    head = LayerProfile(parameters=0, forward_operations=4)
    costly = replace(
        TWO,
        profile=ModelProfile(layers=(layer, layer), head=head),
        topology=Topology((machine(0, 1.0, memory_rate=1000.0, overhead_s=0.5),)),
        network=network(1, 0.0, 1.0),
    )
    alone = solo(0, 2, 1)
    assert costly.first_token_s(alone) == TWO.first_token_s(alone) + 10 * 0.5
    assert costly.next_token_s(alone) == pytest.approx(TWO.next_token_s(alone) + 10 * 0.5)


def test_one_machine_wins_when_splitting_is_slower() -> None:
    assert search_serving(TWO)[0].layout == solo(1, 2, 1)


def test_a_model_that_fits_nobody_alone_is_split() -> None:
    small = Topology((machine(0, 1.0, 3000), machine(1, 2.0, 3000)))
    found = search_serving(replace(TWO, topology=small))
    assert [len(one.layout.stages) for one in found] == [2]
    assert found[0].exact
    assert (
        search_serving(replace(TWO, topology=Topology((machine(0, 1.0, 1000), machine(1, 2.0, 1000))))) == []
    )
    assert search_serving(replace(TWO, topology=Topology(()), network=network(0, 0.0, 1.0))) == []


def test_machines_without_speed_or_links_are_not_used() -> None:
    fast = Topology((machine(0, 1.0, 3000), machine(1, 0.0, 3000)))
    assert search_serving(replace(TWO, topology=fast)) == []
    apart = replace(
        TWO, topology=Topology((machine(0, 1.0, 3000), machine(1, 1.0, 3000))), network=network(2, 0.0, 0.0)
    )
    assert search_serving(apart) == []


def random_cost(draw: random.Random, objective: Objective, machines: int, layers: int) -> ServingCost:
    regions = draw.randrange(1, machines + 1)
    latency = np.array([[draw.uniform(0, 0.05) for _ in range(regions)] for _ in range(regions)])
    rate = np.array([[10 ** draw.uniform(3, 6) for _ in range(regions)] for _ in range(regions)])
    profile = ModelProfile(
        layers=tuple(
            LayerProfile(
                parameters=draw.randrange(100, 1000),
                forward_flops=QuadraticGrowth(0.0, draw.uniform(1, 3), 0.01),
                activation_bytes=QuadraticGrowth(0.0, draw.uniform(1, 10)),
                boundary_numbers=QuadraticGrowth(0.0, draw.uniform(1, 20)),
                cache_numbers=QuadraticGrowth(0.0, draw.uniform(0, 5)),
            )
            for _ in range(layers)
        ),
        embedding=LayerProfile(parameters=300),
        tied=300,
    )
    workload = ServingWorkload(objective, draw.randrange(1, 20), draw.randrange(1, 20), draw.randrange(1, 9))
    cost = ServingCost(
        profile,
        Topology(
            tuple(
                machine(
                    index, 10 ** draw.uniform(2, 4), draw.randrange(2000, 30000), 10 ** draw.uniform(4, 6)
                )
                for index in range(machines)
            )
        ),
        Network(
            np.array([draw.randrange(regions) for _ in range(machines)]),
            (latency + latency.T) / 2,
            (rate + rate.T) / 2,
        ),
        workload,
    )
    if objective == "throughput" and draw.random() < 0.3:
        limited = [layout for layout in all_layouts(cost) if cost.fits(layout)]
        if limited:
            times = [cost.next_token_s(layout, loaded=True) for layout in limited]
            return replace(cost, workload=replace(workload, next_token_limit_s=draw.choice(times)))
    return cost


def all_layouts(cost: ServingCost) -> Iterator[Layout]:
    layers = cost.num_layers
    for stages in range(1, min(layers, cost.num_machines) + 1):
        for inner in combinations(range(1, layers), stages - 1):
            cuts = list(pairwise((0, *inner, layers)))
            for machines in permutations(range(cost.num_machines), stages):
                yield row(*((one, start, stop) for one, (start, stop) in zip(machines, cuts, strict=True)))


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("chunk", range(4))
def test_the_search_equals_all_layouts(objective: Objective, chunk: int) -> None:
    for seed in range(40):
        draw = random.Random(1000 * chunk + seed)
        cost = random_cost(draw, objective, draw.randrange(1, 5), draw.randrange(1, 6))
        fitting = [layout for layout in all_layouts(cost) if cost.fits(layout)]
        found = search_serving(cost)
        assert bool(found) == bool(fitting)
        if not found:
            continue
        assert found[0].exact
        assert all(cost.fits(one.layout) for one in found)
        if objective == "latency":
            assert cost.request_s(found[0].layout) == pytest.approx(
                min(map(cost.request_s, fitting)), rel=1e-9
            )
        else:
            limit = cost.workload.next_token_limit_s
            assert found[0].within_limits or limit is None
            assert found[0].tokens_per_s == pytest.approx(max(map(cost.tokens_per_s, fitting)), rel=1e-8)


def test_a_limit_on_the_first_token_is_kept_where_it_can_be() -> None:
    kept = worse = 0
    for seed in range(60):
        draw = random.Random(seed)
        cost = random_cost(draw, "throughput", 4, 4)
        fitting = [layout for layout in all_layouts(cost) if cost.fits(layout)]
        if not fitting:
            continue
        limit = sorted(map(cost.first_token_s, fitting))[len(fitting) // 4]
        limited = replace(
            cost, workload=replace(cost.workload, first_token_limit_s=limit, next_token_limit_s=None)
        )
        best = max(cost.tokens_per_s(layout) for layout in fitting if cost.first_token_s(layout) <= limit)
        found = search_serving(limited)[0]
        assert found.within_limits
        assert not found.exact
        kept += 1
        worse += found.tokens_per_s < best * 0.99
    assert kept > 30
    assert worse <= kept * 0.1


def test_many_machines_are_searched_in_some_orders() -> None:
    draw = random.Random(5)
    cost = random_cost(draw, "latency", 60, 12)
    found = search_serving(cost)
    assert found
    assert not found[0].exact
    assert cost.fits(found[0].layout)
    alone = [layout for one in range(60) if cost.fits(layout := solo(one, 12, 1))]
    assert cost.request_s(found[0].layout) <= min(map(cost.request_s, alone), default=math.inf)
    assert search_serving(cost) == found


@pytest.mark.parametrize("num_layers", [5, 12])
def test_alike_machines_get_alike_shares_for_short_requests(num_layers: int) -> None:
    alike = Topology(tuple(machine(index, 1.0, 1500 * num_layers) for index in range(2)))
    cost = ServingCost(
        ModelProfile(layers=(LAYER,) * num_layers), alike, network(2, 0.5, 100.0), TWO.workload
    )
    (best, *_) = search_serving(cost)
    assert best.exact
    assert sorted(stage.stop - stage.start for stage in best.layout.stages) == [
        num_layers // 2,
        num_layers - num_layers // 2,
    ]
