"""Plans name a codec for each boundary between stages, and predict its bytes and the step with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.platform.planning.models import PROFILE, job, lan, machine, make_plan

from share_compute.errors import UserError
from share_compute.planning.cost.schedule_simulator import simulate_step
from share_compute.planning.dry_run import dry_run, lay_out
from share_compute.planning.planner import Solution, solve
from share_compute.planning.report import PlanReport
from share_compute.specification import TrainJob
from share_compute.specification.boundaries import fixed_boundaries
from share_compute.topology import Link, Topology

RAW = 4 * 128 * 1024 * 4
"""Bytes of a microbatch's activation: 4 samples of 128 tokens with 1,024 float32 numbers."""
INT8 = RAW // 4 + RAW // 4 // 256 * 2


def compressed(name: str, **options: Any) -> TrainJob:
    stages = options.pop("stages", 3)
    training = {"boundary_compression": {"name": name, **options}}
    return job(training=training, stages=stages, members_per_stage=1, backups=False)


def chain(*bytes_per_s: float) -> Topology:
    """Return machines a, b, c, ... whose neighbours are joined by links of these rates; other links are dead."""
    names = "abcdef"[: len(bytes_per_s) + 1]
    links = [
        Link(one, other, 5e-4, bytes_per_s[place] if further == place + 1 else 0.0)
        for place, one in enumerate(names)
        for further, other in enumerate(names)
        if further > place
    ]
    return Topology(tuple(machine(name) for name in names), tuple(links))


def step_s(solution: Solution) -> float:
    assert solution.timeline is not None
    return solution.timeline.step_s


def test_the_plan_says_codec_and_bytes_of_each_boundary() -> None:
    for name, size in (("none", RAW), ("bf16", RAW // 2), ("int8", INT8)):
        plan = make_plan(compressed(name), chain(1e6, 1e6), PROFILE)
        assert [stage.boundary_codec for stage in plan.stages] == [name, name, "none"]
        assert [stage.boundary_bytes for stage in plan.stages] == [size, size, None]
    assert INT8 <= 0.26 * RAW


def test_the_step_is_predicted_with_the_compressed_bytes() -> None:
    plain, compact = (solve(compressed(name), chain(1e5, 1e5), PROFILE, 0, {}) for name in ("none", "int8"))
    assert step_s(compact) < 0.35 * step_s(plain)
    assert compact.plan.prediction is not None
    assert compact.plan.prediction.lower_bound_s <= compact.plan.prediction.formula_s
    report = dry_run(compressed("int8"), chain(1e5, 1e5), PROFILE)
    assert report.plan == compact.plan
    assert PlanReport.model_validate_json(report.model_dump_json()) == report


def test_memory_is_that_without_compression() -> None:
    """Boundary tensors are kept as they were computed, and are decoded when they arrive."""
    plain, compact = (make_plan(compressed(name), chain(1e6, 1e6), PROFILE) for name in ("none", "int8"))
    assert [stage.members[0].memory_bytes for stage in plain.stages] == [
        stage.members[0].memory_bytes for stage in compact.stages
    ]


def test_fixed_boundaries_are_compressed_where_the_model_is_cut_there() -> None:
    plan = make_plan(compressed("int8"), chain(1e6, 1e6), PROFILE)
    assert plan.boundaries.int8 == tuple(stage.stop for stage in plan.stages[:-1])
    fixed = job(stages=3, members_per_stage=1, backups=False).with_boundaries(plan.boundaries)
    assert make_plan(fixed, chain(1e6, 1e6), PROFILE).stages == plan.stages
    moved = fixed.with_boundaries(fixed_boundaries({1: "int8", 11: "bf16"}))
    plan = make_plan(moved, chain(1e9, 1e9), PROFILE)
    assert [stage.boundary_codec for stage in plan.stages] == ["none"] * 3
    assert plan.boundaries.layers == ()


def test_slow_links_are_cut_where_boundaries_are_compressed() -> None:
    fixed = compressed("fixed", stages=2, int8=[2])
    assert make_plan(fixed, chain(3e4), PROFILE).stages[0].stop == 2
    assert make_plan(fixed, chain(1e9), PROFILE).stages[0].stop == 7


@pytest.mark.parametrize("layers", [[12], [3, 2**31 - 1]])
def test_a_boundary_that_the_model_does_not_have_is_refused(layers: list[int]) -> None:
    with pytest.raises(UserError, match=r"training\.boundary_compression: there is no layer") as caught:
        make_plan(compressed("fixed", bf16=layers), chain(1e6, 1e6), PROFILE)
    assert caught.value.hint == "name layers from 1 to 11"


class TestAuto:
    @pytest.mark.parametrize(
        ("rates", "codecs"),
        [
            ((1e9, 1e9), ["none", "none"]),
            ((1e4, 1e4), ["int8", "int8"]),
            ((1e9, 1e4), ["none", "int8"]),
            ((1e4, 1e9), ["int8", "none"]),
        ],
    )
    def test_only_slow_links_are_compressed(self, rates: tuple[float, float], codecs: list[str]) -> None:
        plan = make_plan(compressed("auto"), chain(*rates), PROFILE)
        by_neighbours = {
            frozenset(member.name for stage in (one, other) for member in stage.members): one.boundary_codec
            for one, other in zip(plan.stages, plan.stages[1:], strict=False)
        }
        found = [by_neighbours[frozenset("ab")], by_neighbours[frozenset("bc")]]
        assert found == codecs

    @settings(max_examples=15, deadline=None)
    @given(st.lists(st.floats(4.0, 8.0), min_size=1, max_size=3))
    def test_no_less_compression_would_do(self, exponents: list[float]) -> None:
        topology = chain(*(10**each for each in exponents))
        stages = len(exponents) + 1
        auto, most, none = (
            solve(compressed(name, stages=stages), topology, PROFILE, 0, {})
            for name in ("auto", "int8", "none")
        )
        limit_s = 1.01 * step_s(most)
        assert step_s(auto) <= limit_s
        codecs = {stage.stop: stage.boundary_codec for stage in auto.plan.stages[:-1]}
        assert all(codec == "none" for codec in codecs.values()) == (step_s(none) <= limit_s)
        for layer, codec in codecs.items():
            for less in ("none", "bf16")[: ("none", "bf16", "int8").index(codec)]:
                boundaries = fixed_boundaries({**codecs, layer: less})
                cost = replace(auto.cost, workload=replace(auto.cost.workload, boundaries=boundaries))
                assert simulate_step(cost, auto.layout).step_s > limit_s

    def test_nothing_is_compressed_on_machines_of_unknown_speed(self) -> None:
        plan = make_plan(compressed("auto", stages=2), lan(machine("a", 0), machine("b", 0)), PROFILE)
        assert [stage.boundary_codec for stage in plan.stages] == ["none", "none"]
        plan = make_plan(compressed("int8", stages=2), lan(machine("a", 0), machine("b", 0)), PROFILE)
        assert [stage.boundary_codec for stage in plan.stages] == ["int8", "none"]

    def test_one_machine_has_no_boundary(self) -> None:
        plan = make_plan(compressed("auto", stages=1), lan(machine("a")), PROFILE)
        assert plan.boundaries.layers == ()

    def test_the_timeline_of_a_running_plan_has_its_codecs(self) -> None:
        topology = chain(1e4, 1e9)
        solution = solve(compressed("auto"), topology, PROFILE, 0, {})
        timeline = lay_out(compressed("auto"), solution.plan, topology, PROFILE, {})
        assert timeline.step_s == step_s(solution)
