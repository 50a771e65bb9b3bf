"""The event simulator of a step: compared with calculations by hand, with the textbook, and with the formula."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from share_compute.models.profiles.profile import LayerProfile, ModelProfile, QuadraticGrowth
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout, StageLayout, solo
from share_compute.planning.cost.schedule_simulator import (
    CROWDED_WORK,
    SIDE_THREADS,
    StepTimeline,
    simulate_step,
)
from share_compute.planning.network.network import Network
from share_compute.protocol.schedule import one_forward_one_backward
from share_compute.specification.workload import TrainingWorkload
from share_compute.topology import Contributor, Device, Topology


def machine(index: int, speed: float, memory_rate: float = 0.0) -> Contributor:
    device = Device("cpu", "cpu", 10**15, {"float32": speed}, memory_rate)
    return Contributor(id=f"c{index}", name=f"c{index}", devices=(device,))


def one_region(count: int, latency_s: float, bytes_per_s: float) -> Network:
    return Network(np.zeros(count, dtype=np.int64), np.array([[latency_s]]), np.array([[bytes_per_s]]))


def plain_cost(
    layers: Sequence[tuple[float, float]],
    *,
    machines: int,
    microbatches: int,
    latency_s: float = 0.0,
    carry_s: float = 0.0,
    parameters: int = 0,
    tied: int = 0,
    memory_rate: float = 0.0,
) -> TrainingCost:
    """Machines of 1 FLOP/s, layers of (forward, backward) seconds, links that a microbatch keeps busy so long."""
    profile = ModelProfile(
        layers=tuple(
            LayerProfile(
                parameters=parameters,
                forward_flops=QuadraticGrowth(forward),
                backward_flops=QuadraticGrowth(backward),
                boundary_numbers=QuadraticGrowth(250.0),
            )
            for forward, backward in layers
        ),
        tied=tied,
    )
    return TrainingCost(
        profile=profile,
        topology=Topology(tuple(machine(index, 1.0, memory_rate) for index in range(machines))),
        network=one_region(machines, latency_s, 1000 / carry_s if carry_s else math.inf),
        workload=TrainingWorkload(batch_size=microbatches, microbatches=microbatches),
    )


def row(cost: TrainingCost) -> Layout:
    """One layer for each machine."""
    count = cost.workload.microbatches
    return Layout(
        tuple(StageLayout(index, index + 1, (index,), (count,)) for index in range(cost.num_machines))
    )


def spans(timeline: StepTimeline, stage: int, member: int = 0) -> list[tuple[str, float, float]]:
    return [
        (f"{cell.microbatch}{cell.kind}", cell.start_s, cell.stop_s)
        for cell in timeline.cells
        if (cell.stage, cell.member) == (stage, member)
    ]


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 7, 32])
def test_equal_stages_and_free_links_take_what_the_textbook_says(stages: int, microbatches: int) -> None:
    cost = plain_cost([(1.0, 2.0)] * stages, machines=stages, microbatches=microbatches)
    timeline = simulate_step(cost, row(cost))
    assert timeline.step_s == (microbatches + stages - 1) * 3.0
    assert cost.step_s(row(cost)) == timeline.step_s
    assert timeline.busy_fractions == pytest.approx(
        dict.fromkeys(range(stages), microbatches / (microbatches + stages - 1))
    )


def test_two_stages_over_a_link_by_hand() -> None:
    cost = plain_cost([(1.0, 2.0)] * 2, machines=2, microbatches=2, latency_s=0.5, carry_s=1.0)
    timeline = simulate_step(cost, row(cost))
    assert spans(timeline, 0) == [("0F", 0, 1), ("1F", 1, 2), ("0B", 7, 9), ("1B", 10, 12)]
    assert spans(timeline, 1) == [("0F", 2.5, 3.5), ("0B", 3.5, 5.5), ("1F", 5.5, 6.5), ("1B", 6.5, 8.5)]
    # The second machine updates when the message of the first has arrived.
    assert timeline.step_s == 12.5
    assert timeline.busy_fractions == {0: 6 / 12.5, 1: 6 / 12.5}
    assert timeline.updates == {0: (12, 12), 1: (12.5, 12.5)}
    assert timeline.transfers == ()
    sent = simulate_step(cost, row(cost), with_transfers=True).transfers
    assert {(f"{one.microbatch}{one.kind}", one.source[0], one.start_s, one.stop_s) for one in sent} == {
        ("0F", 0, 1, 2.5),
        ("1F", 0, 2, 3.5),
        ("0B", 1, 5.5, 7),
        ("1B", 1, 8.5, 10),
    }


def test_a_link_carries_one_tensor_after_the_other() -> None:
    cost = plain_cost([(1.0, 1.0)] * 2, machines=2, microbatches=3, carry_s=3.0)
    arrivals = [start for name, start, _ in spans(simulate_step(cost, row(cost)), 1) if name.endswith("F")]
    # Sent at 1, at 2, and when the first gradient is back: 4 -> 6 (backward) -> 9 (link) -> 10 -> 11.
    assert arrivals == [4.0, 7.0, 14.0]


def test_a_slow_first_stage_hides_the_trip_through_the_others() -> None:
    cost = plain_cost([(5.0, 5.0), (1.0, 1.0)], machines=2, microbatches=4)
    assert simulate_step(cost, row(cost)).step_s == 40.0
    assert cost.step_s(row(cost)) == 40.0


def test_members_share_microbatches_and_sum_their_gradients() -> None:
    # 4 Mi parameters: 16 MiB of gradients in 2 buckets; each member sends 2 * 1/2 * 16 MiB.
    parameters, rate = 4 * 2**20, 2.0**20
    cost = plain_cost([(1.0, 2.0)], machines=2, microbatches=4, parameters=parameters, carry_s=1000 / rate)
    layout = Layout((StageLayout(0, 1, (0, 1), (2, 2)),))
    timeline = simulate_step(cost, layout)
    assert cost.sum_s(layout.stages[0]) == 16.0
    # Both start their last backward at 4 and end it at 6: 4 + 16 is later than 6 + 16 / 2.
    assert timeline.step_s == 20.0
    assert cost.step_s(layout) == 20.0


def test_a_gradient_reaches_its_backup_before_the_step_counts() -> None:
    plain = plain_cost([(1.0, 2.0)] * 2, machines=2, microbatches=2, latency_s=0.5, carry_s=1.0)
    cost = replace(plain, workload=replace(plain.workload, backups=True))
    stage = row(cost).stages[0]
    wait_s = cost.log_s(stage)
    assert simulate_step(cost, row(cost)).step_s == simulate_step(plain, row(plain)).step_s + wait_s
    assert wait_s >= 2 * 0.5


def test_a_tied_weight_is_exchanged_between_first_and_last_stage() -> None:
    without = plain_cost([(1.0, 1.0)] * 2, machines=2, microbatches=1, carry_s=0.001, latency_s=0.25)
    tied = plain_cost([(1.0, 1.0)] * 2, machines=2, microbatches=1, carry_s=0.001, latency_s=0.25, tied=10**6)
    # 4 MB over 1 MB/s and one latency; then the other machine receives the sum, as without a tied weight.
    assert simulate_step(tied, row(tied)).step_s == pytest.approx(
        simulate_step(without, row(without)).step_s + 4.25
    )
    frozen = replace(tied, profile=tied.profile.model_copy(update={"tied_trains": False}))
    assert simulate_step(frozen, row(frozen)).step_s == simulate_step(without, row(without)).step_s
    alone = solo(0, 2, 1)
    assert simulate_step(tied, alone).step_s == simulate_step(without, alone).step_s


def test_the_update_is_part_of_the_step() -> None:
    cost = plain_cost([(1.0, 2.0)], machines=1, microbatches=2, parameters=1000, memory_rate=28_000.0)
    timeline = simulate_step(cost, solo(0, 1, 2))
    assert (
        timeline.step_s == 7.0
    )  # 7 passes over 4000 bytes at 28 kB/s; reading weights takes less than computing
    assert timeline.busy_fractions == {0: 1.0}


def test_what_never_arrives_takes_forever() -> None:
    cost = plain_cost([(1.0, 1.0)] * 2, machines=2, microbatches=2)
    cut = TrainingCost(cost.profile, cost.topology, one_region(2, 0.001, 0.0), cost.workload)
    timeline = simulate_step(cut, row(cut))
    assert timeline.step_s == math.inf
    assert timeline.busy_fractions == {0: 0.0, 1: 0.0}


def random_cost(draw: random.Random) -> TrainingCost:
    machines, microbatches = draw.randrange(1, 7), draw.randrange(1, 17)
    regions = draw.randrange(1, machines + 1)
    latency = np.array([[draw.uniform(0, 0.1) for _ in range(regions)] for _ in range(regions)])
    rate = np.array([[10 ** draw.uniform(3.5, 7) for _ in range(regions)] for _ in range(regions)])
    layers = tuple(
        LayerProfile(
            parameters=draw.randrange(1000, 10_000_000),
            forward_flops=QuadraticGrowth(draw.uniform(1, 2)),
            backward_flops=QuadraticGrowth(draw.uniform(1, 4)),
            boundary_numbers=QuadraticGrowth(draw.uniform(1, 1e4)),
        )
        for _ in range(draw.randrange(1, 9))
    )
    return TrainingCost(
        ModelProfile(layers=layers, tied=draw.choice([0, 1000])),
        Topology(tuple(machine(index, draw.uniform(1, 10), 1e9) for index in range(machines))),
        Network(
            np.array([draw.randrange(regions) for _ in range(machines)]),
            (latency + latency.T) / 2,
            (rate + rate.T) / 2,
        ),
        TrainingWorkload(microbatches, microbatches),
    )


def random_layout(draw: random.Random, cost: TrainingCost) -> Layout:
    """Stages of any sizes; members behind the first stage stand alone, as the formula says where it is no bound."""
    layers, machines = cost.num_layers, list(range(cost.num_machines))
    draw.shuffle(machines)
    stages = draw.randrange(1, min(layers, len(machines)) + 1)
    cuts = [0, *sorted(draw.sample(range(1, layers), stages - 1)), layers]
    widest = min(len(machines) - stages + 1, cost.workload.microbatches)
    size = draw.randrange(1, widest + 1)
    groups = [tuple(machines[:size]), *((machines[size + index],) for index in range(stages - 1))]
    built = []
    for group, (start, stop) in zip(groups, pairwise(cuts), strict=True):
        members = group
        shares = cost.shares(members, start, stop)
        # A member that is too slow to get microbatches is left out.
        while shares is None:
            slowest = max(members, key=lambda member: cost.cell_s(member, start, stop))
            members = tuple(member for member in members if member != slowest)
            shares = cost.shares(members, start, stop)
        built.append(StageLayout(start, stop, members, shares))
    return Layout(tuple(built))


@settings(max_examples=300)
@given(st.integers(0, 2**32))
def test_no_schedule_is_faster_than_the_formula(seed: int) -> None:
    draw = random.Random(seed)
    cost = random_cost(draw)
    cost = replace(cost, workload=replace(cost.workload, backups=draw.random() < 0.5))
    layout = random_layout(draw, cost)
    timeline = simulate_step(cost, layout)
    # The gradient of a stage behind the first may reach its backup while those before it go backward.
    hidden_s = max((cost.log_s(stage) for stage in layout.stages[1:]), default=0.0)
    assert timeline.step_s >= (cost.step_s(layout) - hidden_s) * (1 - 1e-9)
    assert all(0 < share <= 1 + 1e-9 for share in timeline.busy_fractions.values())
    assert set(timeline.busy_fractions) == set(layout.machines)


@settings(max_examples=100)
@given(st.integers(0, 2**32))
def test_members_keep_the_order_of_the_real_schedule(seed: int) -> None:
    draw = random.Random(seed)
    cost = random_cost(draw)
    layout = random_layout(draw, cost)
    timeline = simulate_step(cost, layout)
    shares = [stage.shares for stage in layout.stages]
    for index, stage in enumerate(layout.stages):
        for member in range(len(stage.members)):
            ran = spans(timeline, index, member)
            assert [name for name, _, _ in ran] == [
                str(action) for action in one_forward_one_backward(shares, index, member)
            ]
            assert all(stop <= start for (_, _, stop), (_, start, _) in pairwise(ran))


def test_a_thousand_stages_are_laid_out_in_seconds() -> None:
    cost = plain_cost([(1.0, 2.0)] * 1000, machines=1000, microbatches=64)
    begun = time.process_time()
    timeline = simulate_step(cost, row(cost))
    assert time.process_time() - begun < 10
    assert len(timeline.cells) == 2 * 64 * 1000
    assert timeline.step_s == (64 + 1000 - 1) * 3.0


def on_one_host(cost: TrainingCost, threads: int, machines: Sequence[int]) -> TrainingCost:
    """Let some machines, of one thread each, share a host of so many threads."""
    contributors = tuple(
        replace(one, host="host", host_threads=threads) if index in machines else one
        for index, one in enumerate(cost.topology.contributors)
    )
    return replace(cost, topology=Topology(contributors))


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_stages_that_share_one_core_take_the_sum_of_their_work(microbatches: int) -> None:
    cost = on_one_host(plain_cost([(1.0, 2.0), (1.0, 2.0)], machines=2, microbatches=microbatches), 1, [0, 1])

    # The side threads of both machines take part, while one machine computes and while both do.
    work_s = 2 * 3 * microbatches
    most = (1 + 2 * SIDE_THREADS) * CROWDED_WORK
    assert work_s * (1 + SIDE_THREADS) <= simulate_step(cost, row(cost)).step_s <= work_s * most * (1 + 1e-9)


def test_stages_that_share_two_cores_wait_for_these_only_while_three_compute() -> None:
    """A microbatch is at one stage at a time; with many of them, three stages want two cores."""
    alone = plain_cost([(1.0, 2.0)] * 3, machines=3, microbatches=1)
    assert (
        simulate_step(on_one_host(alone, 2, [0, 1, 2]), row(alone)).step_s
        == simulate_step(alone, row(alone)).step_s
    )

    many = plain_cost([(1.0, 2.0)] * 3, machines=3, microbatches=100)
    crowded = simulate_step(on_one_host(many, 2, [0, 1, 2]), row(many))
    expected = 3 * (1 + SIDE_THREADS) / 2 * CROWDED_WORK
    assert crowded.step_s == pytest.approx(100 * 3 * expected, rel=0.03)
    assert all(slowdown == pytest.approx(expected, rel=0.05) for slowdown in crowded.slowdowns.values())


def test_a_host_with_cores_for_all_slows_nobody_down() -> None:
    cost = plain_cost([(1.0, 2.0)] * 3, machines=3, microbatches=4)
    simulated = simulate_step(on_one_host(cost, 3, [0, 1, 2]), row(cost))

    assert simulated == simulate_step(cost, row(cost))
    assert not simulated.slowdowns


@settings(deadline=None, max_examples=60)
@given(
    layers=st.lists(st.tuples(st.floats(0.1, 5.0), st.floats(0.1, 5.0)), min_size=2, max_size=6),
    microbatches=st.integers(1, 6),
    carry_s=st.floats(0.0, 2.0),
    threads=st.integers(1, 3),
    data=st.data(),
)
def test_shared_cores_cost_no_more_than_all_work_in_turn(
    layers: list[tuple[float, float]], microbatches: int, carry_s: float, threads: int, data: st.DataObject
) -> None:
    """The work of a host fits into its cores, and no cell takes longer than a whole core's share says."""
    count = len(layers)
    shared = data.draw(st.sets(st.integers(0, count - 1), min_size=2))
    cost = plain_cost(layers, machines=count, microbatches=microbatches, carry_s=carry_s)
    alone = simulate_step(cost, row(cost))
    crowded = simulate_step(on_one_host(cost, threads, sorted(shared)), row(cost))

    work_s = sum(microbatches * sum(layers[index]) for index in shared)
    assert crowded.step_s >= alone.step_s * (1 - 1e-9)
    assert crowded.step_s >= work_s / threads * (1 - 1e-9)
    most = max(1.0, len(shared) * (1 + SIDE_THREADS) / threads) * CROWDED_WORK
    assert crowded.step_s <= alone.step_s * most * (1 + 1e-9)
    assert all(slowdown >= 1 - 1e-9 for slowdown in crowded.slowdowns.values())
    assert [cell[:4] for cell in crowded.cells] == [cell[:4] for cell in alone.cells]


def test_a_host_is_shared_with_a_machine_that_never_gets_its_input() -> None:
    cost = plain_cost([(1.0, 2.0)] * 3, machines=3, microbatches=2)
    cut = replace(cost, network=one_region(3, 0.0, 0.0))

    assert simulate_step(on_one_host(cut, 1, [0, 1, 2]), row(cost)).step_s == math.inf
