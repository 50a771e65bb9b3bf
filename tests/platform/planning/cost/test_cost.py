"""The cost model: its tables, its memory compared with the real schedule, its shares compared with all others."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.platform.planning.instances import instance, sparing, with_backups, with_overhead
from tests.platform.protocol.schedules import peak_in_flight

from share_compute.models.profiles.profile import QuadraticGrowth
from share_compute.planning.cost.cost import STEP_OPERATIONS, TrainingCost, fill_shares, most_carried
from share_compute.planning.cost.layout import Layout, StageLayout, solo
from share_compute.planning.cost.memory import after_a_loss, gradient_sets
from share_compute.planning.cost.options import Options
from share_compute.planning.cost.schedule_simulator import simulate_step
from share_compute.planning.cost.timings import LayerTiming
from share_compute.protocol.schedule import blocks, one_forward_one_backward, windows


@st.composite
def stage_shares(draw: st.DrawFn) -> list[list[int]]:
    """Return microbatches of each member of each stage; all stages have the same sum."""
    count = draw(st.integers(1, 24))
    stages = []
    for _ in range(draw(st.integers(1, 5))):
        cuts = draw(st.sets(st.integers(1, count - 1), max_size=min(5, count - 1))) if count > 1 else set()
        edges = [0, *sorted(cuts), count]
        stages.append([stop - start for start, stop in pairwise(edges)])
    return stages


@given(stage_shares())
def test_memory_counts_all_that_the_real_schedule_keeps_in_flight(shares: list[list[int]]) -> None:
    ahead = windows([len(members) for members in shares])
    for stage, members in enumerate(shares):
        for member, share in enumerate(members):
            kept = peak_in_flight(one_forward_one_backward(shares, stage, member))
            assert kept <= min(share, ahead[stage] + 1)


def test_memory_of_a_member_by_hand() -> None:
    cost = instance(1, machines=2, layers=4, microbatches=4)
    layout = Layout((StageLayout(0, 2, (0,), (4,)), StageLayout(2, 4, (1,), (4,))))
    workload, profile = cost.workload, cost.profile
    samples = workload.microbatch_size
    weights = profile.embedding.parameters + sum(layer.parameters for layer in profile.layers[:2])
    activations = sum(piece.activation_bytes.at(8) for piece in (profile.embedding, *profile.layers[:2]))
    boundary = samples * 4 * profile.layers[1].boundary_numbers.at(8)
    largest = max(piece.largest for piece in (profile.embedding, *profile.layers[:2]))
    # Two microbatches are in flight in the first of two stages; boundary tensors are kept of all four.
    expected = weights * 4 * (2 + workload.optimizer_tensors) + 2 * samples * activations
    expected += 4 * 2 * boundary + 4 * max(largest, 2 * profile.tied)
    assert cost.member_bytes(layout, 0, 0) == pytest.approx(expected)
    last = sum(layer.parameters for layer in profile.layers[2:]) + profile.head.parameters + profile.tied
    activations = sum(piece.activation_bytes.at(8) for piece in (*profile.layers[2:], profile.head))
    expected = last * 4 * (2 + workload.optimizer_tensors) + samples * activations + 4 * 2 * boundary
    largest = max(piece.largest for piece in (*profile.layers[2:], profile.head))
    expected += 4 * max(largest, 2 * profile.tied)
    assert cost.member_bytes(layout, 1, 0) == pytest.approx(expected)


def test_memory_of_layers_that_are_computed_again_by_hand() -> None:
    plain = instance(1, machines=2, layers=4, microbatches=4)
    cost = replace(plain, workload=replace(plain.workload, activation_checkpointing=True))
    profile, samples = cost.profile, cost.workload.microbatch_size
    layout = Layout((StageLayout(0, 2, (0,), (4,)), StageLayout(2, 4, (1,), (4,))))
    weights = profile.embedding.parameters + sum(layer.parameters for layer in profile.layers[:2])
    kept = profile.embedding.activation_bytes.at(8)
    kept += sum(4 * layer.boundary_numbers.at(8) for layer in profile.layers[:2])
    inside = max(layer.activation_bytes.at(8) for layer in profile.layers)
    boundary = samples * 4 * profile.layers[1].boundary_numbers.at(8)
    largest = max(piece.largest for piece in (profile.embedding, *profile.layers[:2]))
    expected = weights * 4 * (2 + cost.workload.optimizer_tensors) + samples * (2 * kept + inside)
    expected += 4 * 2 * boundary + 4 * max(largest, 2 * profile.tied)
    assert cost.member_bytes(layout, 0, 0) == pytest.approx(expected)


def test_who_may_have_to_compute_more_keeps_more() -> None:
    assert after_a_loss((8,)) == (8,)
    assert after_a_loss((5, 3)) == (8, 8)
    assert after_a_loss((4, 4, 4)) == (6, 6, 6)
    assert after_a_loss((9, 2, 1)) == (
        11,
        8,
        4,
    )  # without the first member, the other two divide its nine microbatches


@given(stage_shares())
def test_members_hold_as_many_gradients_as_their_order_of_sums_takes(shares: list[list[int]]) -> None:
    stages = tuple(map(tuple, shares))
    runs = max(stages, key=len)
    for stage, members in enumerate(stages):
        for member, share in enumerate(members):
            sets = gradient_sets(stages, stage, member)
            assert 1 <= sets <= share
            if members == runs or len(runs) == 1:
                assert sets == 1


def test_further_gradients_count_where_stages_share_differently() -> None:
    cost = instance(1, machines=4, layers=4, microbatches=6)
    layout = Layout((StageLayout(0, 2, (0,), (6,)), StageLayout(2, 4, (1, 2, 3), (2, 2, 2))))
    assert gradient_sets(((6,), (2, 2, 2)), 0, 0) == 3  # its microbatches belong to three runs in turn
    alone = cost.bytes_needed(0, 2, 6, 3)
    assert cost.member_bytes(layout, 0, 0) == alone + 2 * 4 * cost.trained_parameters(0, 2)
    lent = int(alone / 0.9) + 1
    narrow = replace(
        cost,
        topology=replace(
            cost.topology,
            contributors=tuple(
                replace(machine, devices=(replace(machine.devices[0], memory_bytes=size),))
                for machine, size in zip(
                    cost.topology.contributors, (lent, 10**12, 10**12, 10**12), strict=True
                )
            ),
        ),
    )
    assert narrow.may_fit(layout)
    assert not narrow.fits(layout)


def test_who_is_alone_waits_for_its_backup() -> None:
    plain = replace(instance(3, machines=3, layers=4, microbatches=4), timings={})
    cost = with_backups(plain)
    alone, split = (
        solo(0, 4, 4),
        Layout((StageLayout(0, 2, (0,), (4,)), StageLayout(2, 4, (1, 2), (2, 2)))),
    )
    assert cost.step_s(alone) == plain.step_s(alone)
    assert cost.tail_s(split.stages[1]) == plain.tail_s(split.stages[1])
    size = 4 * cost.trained_parameters(0, 2)
    waits = [cost.network.transfer_s(0, other, size) + cost.network.link(0, other)[0] for other in (1, 2)]
    assert cost.tail_s(split.stages[0]) == pytest.approx(plain.tail_s(split.stages[0]) + min(waits))


def test_layers_that_are_computed_again_take_their_forward_once_more() -> None:
    plain = instance(2, machines=2, layers=4, microbatches=4)
    cost = replace(plain, workload=replace(plain.workload, activation_checkpointing=True), timings={})
    plain = replace(plain, timings={})
    (machine,) = [each for each in range(2) if math.isfinite(plain.cell_s(each, 0, 4))][:1]
    for layer in (1, 2):
        once = plain.cell_s(machine, layer, layer + 1)
        forward = plain.forward_s[machine, layer + 1] - plain.forward_s[machine, layer]
        assert cost.cell_s(machine, layer, layer + 1) == pytest.approx(once + forward)


def test_what_is_frozen_has_neither_gradient_nor_state() -> None:
    plain = instance(1, machines=2, layers=4, microbatches=4)
    first, *rest = plain.profile.layers
    frozen = first.model_copy(update={"frozen": first.parameters})
    cost = replace(plain, profile=plain.profile.model_copy(update={"layers": (frozen, *rest)}))
    layout = Layout((StageLayout(0, 2, (0,), (4,)), StageLayout(2, 4, (1,), (4,))))
    saved = first.parameters * 4 * (1 + cost.workload.optimizer_tensors)
    assert cost.member_bytes(layout, 0, 0) == pytest.approx(plain.member_bytes(layout, 0, 0) - saved)
    assert cost.tail_s(layout.stages[0]) < plain.tail_s(layout.stages[0])


def test_branches_keep_more_beside_their_weights() -> None:
    plain = instance(1, machines=2, layers=4, microbatches=4)
    cost = replace(plain, workload=replace(plain.workload, branch_tensors=2))
    layout = Layout((StageLayout(0, 2, (0,), (4,)), StageLayout(2, 4, (1,), (4,))))
    for place, stage in enumerate(layout.stages):
        more = 2 * 4 * plain.trained_parameters(stage.start, stage.stop)
        assert cost.member_bytes(layout, place, 0) == pytest.approx(
            plain.member_bytes(layout, place, 0) + more
        )
        assert cost.carried_bytes(stage.start, stage.stop) == pytest.approx(
            plain.carried_bytes(stage.start, stage.stop) + more
        )
        assert cost.tail_s(stage) == plain.tail_s(stage)


def test_two_byte_precision_keeps_less_and_a_copy_of_the_weights() -> None:
    plain = instance(1, machines=2, layers=4, microbatches=4)
    cost = replace(plain, workload=replace(plain.workload, dtype="bfloat16"))
    grown = np.diff(cost.activation_bytes)[1:3]
    for layer, kept, before in zip(
        plain.profile.layers[1:3], grown, np.diff(plain.activation_bytes)[1:3], strict=True
    ):
        assert kept == pytest.approx(0.7 * before + 2 * layer.parameters)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=4), st.integers(1, 9))
def test_shares_are_the_best_there_are(cells: list[float], microbatches: int) -> None:
    shares = fill_shares(cells, microbatches)
    every = [
        each for each in product(range(microbatches + 1), repeat=len(cells)) if sum(each) == microbatches
    ]

    def busy(each: tuple[int, ...]) -> float:
        return max(share * cell for share, cell in zip(each, cells, strict=True))

    if shares is not None:
        assert sum(shares) == microbatches
        assert min(shares) >= 1
        assert busy(shares) == min(map(busy, every))
    else:
        assert any(min(each) == 0 and busy(each) == min(map(busy, every)) for each in every)


def test_nobody_without_speed_gets_a_share() -> None:
    assert fill_shares([1.0, math.inf], 4) is None
    assert fill_shares([1.0, 1.0], 1) is None


@given(stage_shares())
def test_some_pair_of_members_carries_at_least_what_the_formula_says(shares: list[list[int]]) -> None:
    for before, after in pairwise(shares):
        common = [len(set(one) & set(other)) for one in blocks(before) for other in blocks(after)]
        assert max(common) >= most_carried(sum(before), len(before), len(after))


@pytest.mark.parametrize("change", [with_overhead, sparing, with_backups])
@pytest.mark.parametrize("seed", range(30))
def test_tables_say_what_the_formula_says(seed: int, change: Callable[[TrainingCost], TrainingCost]) -> None:
    draw = random.Random(seed)
    cost = change(instance(seed, machines=5, layers=6))
    options = Options(cost)
    for _ in range(20):
        members = tuple(sorted(draw.sample(range(5), draw.randrange(1, 4))))
        if not cost.may_share(members) or not set(members) <= set(options.usable):
            continue
        option = options.of(members, 6)
        start = draw.randrange(6)
        stop = draw.randrange(start + 1, 7)
        place = (stop, stop - 1 - start)
        shares = cost.shares(members, start, stop)
        if shares is None:
            assert option.own_s[place] == math.inf
            assert option.window[place] == -1
            continue
        stage = StageLayout(start, stop, members, shares)
        assert option.first_s[place] == pytest.approx(cost.first_s(stage), rel=1e-12)
        assert option.own_s[place] == pytest.approx(cost.busy_s(stage) + cost.tail_s(stage), rel=1e-12)
        for window in range(12):
            fits = all(
                cost.bytes_needed(start, stop, share, window) <= cost.memory_bytes[member]
                for member, share in zip(members, after_a_loss(shares), strict=True)
            )
            assert fits == (window <= option.window[place])


def test_what_has_no_speed_takes_for_ever_and_is_never_nan() -> None:
    for seed in range(200):
        cost = instance(seed, machines=6, layers=3)
        for machine in range(6):
            cell = cost.cell_s(machine, 1, 3)
            assert not math.isnan(cell)
            assert math.isinf(cell) == (cost.topology.contributors[machine].flops_per_s() == 0)
        assert not np.isnan(cost.update_s_per_parameter).any()


def test_memory_traffic_takes_time_where_the_bandwidth_is_known() -> None:
    plain = replace(instance(1, machines=2, layers=4, microbatches=4), timings={})
    moved = QuadraticGrowth(3e6, 5e3)
    layers = tuple(layer.model_copy(update={"forward_traffic": moved}) for layer in plain.profile.layers)
    costly = replace(plain, profile=plain.profile.model_copy(update={"layers": layers}))
    size, tokens = plain.workload.microbatch_size, plain.workload.sequence_length
    for machine, bytes_per_s in enumerate(plain.memory_bytes_per_s):
        extra_s = 4 * size * moved.at(tokens) / bytes_per_s
        assert (extra_s > 0) == np.isfinite(bytes_per_s)
        assert costly.cell_s(machine, 0, 4) == pytest.approx(plain.cell_s(machine, 0, 4) + extra_s)


def test_operations_take_their_time_however_small_they_are() -> None:
    plain = replace(instance(1, machines=2, layers=4, microbatches=4), timings={})
    costly = with_overhead(plain)
    overhead_s = costly.topology.contributors[1].overhead_s
    assert overhead_s > 0
    # 40 forward and 80 backward in each of 4 layers; 12 and 24 in the embedding and in the head.
    operations = 120 * 4 + 36 * 2
    assert costly.cell_s(1, 0, 4) == pytest.approx(plain.cell_s(1, 0, 4) + operations * overhead_s)
    assert costly.cell_s(0, 0, 4) == plain.cell_s(0, 0, 4)
    alone = solo(1, 4, 4)
    extra_s = (4 * operations + STEP_OPERATIONS) * overhead_s
    assert costly.step_s(alone) == pytest.approx(plain.step_s(alone) + extra_s)
    timeline = simulate_step(costly, alone)
    assert timeline.step_s == pytest.approx(simulate_step(plain, alone).step_s + extra_s)
    # Work that a member does once a step does not count as computing.
    idle_s = timeline.step_s * (1 - timeline.busy_fractions[1])
    assert idle_s == pytest.approx(STEP_OPERATIONS * overhead_s)


def test_a_machine_that_nobody_timed_is_taken_to_be_as_wrong_as_the_others() -> None:
    cost = instance(1, machines=3, layers=4)
    first, second, _ = cost.topology.contributors
    slow = {
        machine.id: {
            layer: LayerTiming(
                6 * float(cost.forward_s[row, layer + 1] - cost.forward_s[row, layer]),
                6 * float(cost.backward_s[row, layer + 1] - cost.backward_s[row, layer]),
            )
            for layer in range(2)
        }
        for row, machine in enumerate((first, second))
    }
    corrected = replace(cost, timings=slow)
    assert corrected.forward_s == pytest.approx(6 * cost.forward_s)
    assert corrected.backward_s == pytest.approx(6 * cost.backward_s)
