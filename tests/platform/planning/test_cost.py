"""The cost model: its tables, its memory against the real schedule, its shares against all others."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.platform.planning.instances import instance

from share_compute.planning.cost import LayerTiming, fill_shares, most_carried
from share_compute.planning.layout import Layout, PoolLayout
from share_compute.planning.options import Options
from share_compute.training.schedule import blocks, one_forward_one_backward, peak_in_flight, windows


@st.composite
def pool_shares(draw: st.DrawFn) -> list[list[int]]:
    """Return microbatches of each member of each pool; all pools have the same sum."""
    count = draw(st.integers(1, 24))
    pools = []
    for _ in range(draw(st.integers(1, 5))):
        cuts = draw(st.sets(st.integers(1, count - 1), max_size=min(5, count - 1))) if count > 1 else set()
        edges = [0, *sorted(cuts), count]
        pools.append([stop - start for start, stop in pairwise(edges)])
    return pools


@given(pool_shares())
def test_memory_counts_all_that_the_real_schedule_keeps_in_flight(shares: list[list[int]]) -> None:
    ahead = windows([len(members) for members in shares])
    for pool, members in enumerate(shares):
        for member, share in enumerate(members):
            kept = peak_in_flight(one_forward_one_backward(shares, pool, member))
            assert kept <= min(share, ahead[pool] + 1)


def test_memory_of_a_member_by_hand() -> None:
    cost = instance(1, machines=2, layers=4, microbatches=4)
    layout = Layout((PoolLayout(0, 2, (0,), (4,)), PoolLayout(2, 4, (1,), (4,))))
    workload, profile = cost.workload, cost.profile
    samples = workload.microbatch_size
    weights = profile.embedding.parameters + sum(layer.parameters for layer in profile.layers[:2])
    activations = sum(piece.activation_bytes.at(8) for piece in (profile.embedding, *profile.layers[:2]))
    # Two microbatches are in flight in the first of two pools.
    expected = weights * 4 * (2 + workload.optimizer_tensors) + 2 * samples * activations
    assert cost.member_bytes(layout, 0, 0) == pytest.approx(expected)
    last = sum(layer.parameters for layer in profile.layers[2:]) + profile.head.parameters + profile.tied
    received = samples * 4 * profile.layers[1].boundary_numbers.at(8)
    activations = sum(piece.activation_bytes.at(8) for piece in (*profile.layers[2:], profile.head))
    expected = last * 4 * (2 + workload.optimizer_tensors) + samples * activations + received
    assert cost.member_bytes(layout, 1, 0) == pytest.approx(expected)


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


@given(pool_shares())
def test_some_pair_of_members_carries_at_least_what_the_formula_says(shares: list[list[int]]) -> None:
    for before, after in pairwise(shares):
        common = [len(set(one) & set(other)) for one in blocks(before) for other in blocks(after)]
        assert max(common) >= most_carried(sum(before), len(before), len(after))


@pytest.mark.parametrize("seed", range(30))
def test_tables_say_what_the_formula_says(seed: int) -> None:
    draw = random.Random(seed)
    cost = instance(seed, machines=5, layers=6)
    options = Options(cost)
    for _ in range(20):
        members = tuple(sorted(draw.sample(range(5), draw.randrange(1, 4))))
        if not cost.may_pool(members) or not set(members) <= set(options.usable):
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
        pool = PoolLayout(start, stop, members, shares)
        assert option.first_s[place] == pytest.approx(cost.first_s(pool), rel=1e-12)
        assert option.own_s[place] == pytest.approx(cost.busy_s(pool) + cost.tail_s(pool), rel=1e-12)
        for window in range(12):
            fits = all(
                cost.bytes_needed(start, stop, share, window) <= cost.memory_bytes[member]
                for member, share in zip(members, shares, strict=True)
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
