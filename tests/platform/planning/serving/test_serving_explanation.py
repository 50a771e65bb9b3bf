"""Explanations of serving plans: a valid lower bound, the bottleneck, and a reason for each machine."""

from __future__ import annotations

import random
from typing import Literal

import pytest
from tests.platform.planning.models import GIB, LAYER, PROFILE, job, lan, machine
from tests.platform.planning.serving.test_serving import all_layouts, random_cost

from share_compute.models.profiles.profile import QuadraticGrowth
from share_compute.planning.dry_run import dry_run
from share_compute.planning.plan import NOT_MEASURED
from share_compute.planning.report import PlanReport, ServingPrediction
from share_compute.planning.serving.bound import objective_s, serving_bound_s
from share_compute.planning.serving.explanation import ServingExplanation
from share_compute.planning.serving.parts import step_parts, trip_parts
from share_compute.planning.serving.search import search_serving
from share_compute.specification.workload import ServingWorkload
from share_compute.topology import Link, Topology

Objective = Literal["latency", "throughput"]
OBJECTIVES: list[Objective] = ["latency", "throughput"]
_CACHED = LAYER.model_copy(update={"cache_numbers": QuadraticGrowth(linear=2048)})
CACHING = PROFILE.model_copy(update={"layers": (_CACHED,) * 12})


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_placement_is_below_the_bound(objective: Objective) -> None:
    met = near = 0
    for seed in range(150):
        draw = random.Random(seed)
        cost = random_cost(draw, objective, draw.randrange(1, 5), draw.randrange(1, 6))
        bound_s = serving_bound_s(cost)
        times = [objective_s(cost, layout) for layout in all_layouts(cost) if cost.fits(layout)]
        if times:
            assert bound_s <= min(times) * (1 + 1e-9)
            met += min(times) <= bound_s * (1 + 1e-9)
            near += min(times) <= 2 * bound_s
    assert met > 30
    assert near > 80


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_parts_are_all_that_the_formula_counts(objective: Objective) -> None:
    for seed in range(40):
        draw = random.Random(seed)
        cost = random_cost(draw, objective, 3, 4)
        for layout in list(all_layouts(cost))[::7]:
            trip_s = sum(part.seconds for part in trip_parts(cost, layout))
            steps_s = [part.seconds for part in step_parts(cost, layout)]
            if objective == "latency":
                assert trip_s == pytest.approx(objective_s(cost, layout))
            else:
                assert max(trip_s, *steps_s) == pytest.approx(objective_s(cost, layout))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_machine_has_a_reason_that_is_not_another_ones(objective: Objective) -> None:
    for seed in range(30):
        draw = random.Random(seed)
        cost = random_cost(draw, objective, 5, 5)
        found = search_serving(cost)
        if not found:
            continue
        assert [one.exact for one in found[1:]] == [False] * (len(found) - 1)
        layout = found[0].layout
        explanation = ServingExplanation(cost, layout, exact=found[0].exact, measured=True)
        idle = sorted(set(range(5)) - set(layout.machines))
        reasons = explanation.why_out(idle)
        assert sorted(reasons) == idle
        assert "the search found no place" not in " ".join(reasons.values()) or not found[0].exact
        for place in range(len(layout.stages)):
            assert 0 <= explanation.busy_fraction(place) <= 1
            assert ", busy " in explanation.standing(place)


def served(topology: Topology, objective: Objective = "latency", **request: int) -> ServingPrediction:
    requested = {"prompt_tokens": 64, "new_tokens": 16, "concurrent": 2} | request
    report = dry_run(
        job(strategy="recursive"), topology, CACHING, serving=ServingWorkload(objective, **requested)
    )
    assert PlanReport.model_validate_json(report.model_dump_json()) == report
    assert report.serving is not None
    assert report.serving.gap is not None
    assert report.serving.gap >= 0
    return report.serving


def reason(found: ServingPrediction, name: str) -> str:
    return next(idle.reason for idle in found.plan.idle if idle.name == name)


class TestBottleneck:
    def test_memory_bandwidth(self) -> None:
        found = served(lan(machine("a", 5000, memory_bytes_per_s=1e9)), prompt_tokens=1, new_tokens=100)
        assert (found.bottleneck.kind, found.bottleneck.where) == ("memory", "a")
        assert "reads its weights from memory at 1.0 GB/s" in found.bottleneck.sentence
        assert found.exact
        assert found.gap == pytest.approx(0)

    def test_arithmetic(self) -> None:
        found = served(lan(machine("a", 5, memory_bytes_per_s=1e12)), "throughput")
        assert (found.bottleneck.kind, found.bottleneck.where) == ("compute", "a")
        assert "computes at 5.0 GFLOP/s" in found.bottleneck.sentence

    @pytest.mark.parametrize("objective", OBJECTIVES)
    def test_a_narrow_link(self, objective: Objective) -> None:
        pair = [machine(name, 500, memory_bytes=GIB // 2) for name in "ab"]
        found = served(lan(*pair, bytes_per_s=1e4), objective)
        assert (found.bottleneck.kind, len(found.plan.stages)) == ("link", 2)
        assert "10.0 kB/s" in found.bottleneck.sentence

    @pytest.mark.parametrize("objective", OBJECTIVES)
    def test_a_long_way(self, objective: Objective) -> None:
        pair = [machine(name, 500, memory_bytes=GIB // 2) for name in "ab"]
        found = served(lan(*pair, latency_s=3.0), objective)
        assert found.bottleneck.kind == "latency"
        assert "3.00 s" in found.bottleneck.sentence


class TestMachines:
    def test_one_alone(self) -> None:
        found = served(lan(machine("a", 60), machine("b", 50), machine("c", 60)))
        (member,) = found.plan.stages[0].members
        assert member.standing.startswith("60.0 GFLOP/s, memory read at 20.0 GB/s, busy ")
        assert member.standing.endswith("; alone it is better than any split")
        assert member.busy_fraction == pytest.approx(1)
        assert reason(found, "b").startswith("with it a request would take")
        assert reason(found, "b").endswith("because it computes at 50.0 GFLOP/s")
        assert reason(found, "c").endswith("so it stays free for other work")

    def test_what_is_at_fault_is_what_a_machine_has_less_of(self) -> None:
        found = served(lan(machine("a", 60), machine("b", 61, memory_bytes_per_s=1e10)))
        assert reason(found, "b").endswith("because it reads weights from memory at 10.0 GB/s")

    def test_out_for_speed_memory_and_links(self) -> None:
        links = (Link("a", "island", 1e-3, 0.0), Link("a", "slow", 5e-4, 1e8), Link("a", "tiny", 5e-4, 1e8))
        machines = (
            machine("a", 60),
            machine("island", 60),
            machine("slow", 1, memory_bytes_per_s=1e8),
            machine("tiny", 60, memory_bytes=GIB // 64),
            machine("unknown", 0),
        )
        found = served(Topology(machines, links))
        assert reason(found, "island") == "no usable link joins it to the machines that serve"
        assert "because it reads weights from memory at 100 MB/s" in reason(found, "slow")
        assert reason(found, "tiny").endswith("do not hold a single layer with its caches")
        assert reason(found, "unknown") == NOT_MEASURED

    def test_of_many_only_the_slower_are_called_slower(self) -> None:
        crowd = [machine(f"m{index}", 50 + index / 10) for index in range(20)]
        found = served(lan(*crowd, machine("slow", 10, memory_bytes_per_s=1e9)))
        assert (
            reason(found, "slow")
            == "1 machine serves best of what was found, and it is slower than each of them"
        )
        others = [idle.reason for idle in found.plan.idle if idle.name != "slow"]
        assert not any("slower" in each or "faster" in each or "computes" in each for each in others)

    def test_speeds_that_nobody_measured_are_said_to_be_assumed(self) -> None:
        found = served(lan(machine("a", 0), machine("b", 0)))
        assert found.speeds_assumed
        assert "no machine's speed was measured" in found.plan.stages[0].members[0].standing
        assert not served(lan(machine("a", 50))).speeds_assumed
