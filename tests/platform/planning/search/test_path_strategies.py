"""Pipelines for far machines: the shortest latencies and the fewest cuts between locations, against brute force."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, groupby, pairwise, permutations, product

import pytest
from tests.platform.planning.models import GIB, PROFILE, job, machine, make_plan

from share_compute.errors import PlanInfeasible
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.network.regions import complete
from share_compute.planning.search.path_strategies import (
    LatencyPartitioning,
    LocationPartitioning,
    PathPartitioning,
)
from share_compute.planning.search.paths import MOST_EXACT, PathSearch
from share_compute.planning.search.problem import SearchProblem
from share_compute.specification.workload import TrainingWorkload
from share_compute.topology import Contributor, Link, Topology

SMALL = PROFILE.model_copy(update={"layers": PROFILE.layers[:5]})
Length = Callable[[Sequence[int], Sequence[int]], float]


def drawn(seed: int, count: int, sites: int = 3) -> Topology:
    """Return machines whose links were all measured; some of them carry nothing."""
    draw = random.Random(seed)
    machines = tuple(
        replace(
            machine(f"m{index}", draw.uniform(30, 60), memory_bytes=int(draw.choice((0.5, 0.8, 4)) * GIB)),
            labels={"site": f"site-{draw.randrange(sites)}"},
        )
        for index in range(count)
    )
    links = [
        Link(f"m{one}", f"m{other}", draw.uniform(1e-3, 0.2), 0.0 if draw.random() < 0.1 else 1e8)
        for one, other in combinations(range(count), 2)
    ]
    return Topology(machines, tuple(links))


def costs(topology: Topology, microbatches: int = 4) -> TrainingCost:
    workload = TrainingWorkload(batch_size=8, microbatches=microbatches, sequence_length=64)
    return TrainingCost(SMALL, topology, complete(topology), workload)


def latency(cost: TrainingCost) -> Length:
    """Return the length of a cut between two stages: the largest measured latency, infinite for a dead link."""
    measured = {}
    for link in cost.topology.links:
        one, other = int(link.source[1:]), int(link.target[1:])
        measured[one, other] = measured[other, one] = math.inf if link.is_dead else link.latency_s
    return lambda before, after: max(measured[pair] for pair in product(before, after))


def site(cost: TrainingCost, members: Sequence[int]) -> str:
    return cost.topology.contributors[members[0]].labels["site"]


def can_hold(cost: TrainingCost, stages: Sequence[tuple[int, ...]]) -> bool:
    """Return whether some cut of the layers fits on these stages."""
    for cuts in combinations(range(1, cost.num_layers), len(stages) - 1):
        edges = pairwise((0, *cuts, cost.num_layers))
        ranges = [(members, start, stop) for members, (start, stop) in zip(stages, edges, strict=True)]
        shares = [cost.shares(*one) for one in ranges]
        if None in shares:
            continue
        layout = Layout(
            tuple(
                StageLayout(start, stop, members, share or ())
                for (members, start, stop), share in zip(ranges, shares, strict=True)
            )
        )
        if cost.fits(layout) and math.isfinite(cost.step_s(layout)):
            return True
    return False


def paths(
    cost: TrainingCost, groups: Sequence[tuple[int, ...]], stages: int | None
) -> Iterator[list[tuple[int, ...]]]:
    counts = range(1, len(groups) + 1) if stages is None else [stages]
    for count in counts:
        for order in permutations(groups, count):
            if count <= cost.num_layers and can_hold(cost, order):
                yield list(order)


def placed(strategy: PathPartitioning, problem: SearchProblem) -> list[Layout]:
    """Return the layouts that the planner would choose from."""
    found = strategy.place(problem)
    assert all(problem.cost.fits(candidate.layout) for candidate in found)
    least = min((candidate.penalty for candidate in found), default=())
    return [candidate.layout for candidate in found if candidate.penalty == least]


@pytest.mark.parametrize("seed", range(24))
def test_latency_is_the_least_of_all_pipelines(seed: int) -> None:
    cost = costs(drawn(seed, 4))
    length, stages = latency(cost), (None, 2, 3, 4)[seed % 4]
    found = placed(LatencyPartitioning(), SearchProblem(cost, stages, 1))
    lengths = [
        sum(length(*pair) for pair in pairwise(order))
        for order in paths(cost, [(index,) for index in range(4)], stages)
    ]
    if not lengths:
        assert not found
        return
    for layout in found:
        assert stages in {None, len(layout.stages)}
        members = [stage.members for stage in layout.stages]
        assert sum(length(*pair) for pair in pairwise(members)) == pytest.approx(min(lengths), rel=1e-9)


@pytest.mark.parametrize("seed", range(24))
def test_locations_are_kept_together_with_the_fewest_cuts_between_them(seed: int) -> None:
    cost = costs(drawn(seed, 4, sites=2 + seed % 2), microbatches=8)
    by_site: dict[str, list[int]] = {}
    for index in range(4):
        by_site.setdefault(site(cost, [index]), []).append(index)
    groups, between = [tuple(members) for members in by_site.values()], latency(cost)

    def length(order: Sequence[tuple[int, ...]]) -> tuple[int, float]:
        crossings = sum(site(cost, one) != site(cost, other) for one, other in pairwise(order))
        return crossings, sum(between(*pair) for pair in pairwise(order))

    found = placed(LocationPartitioning(), SearchProblem(cost))
    for layout in found:
        members = [stage.members for stage in layout.stages]
        assert all(len({site(cost, [one]) for one in stage}) == 1 for stage in members)
        assert len(list(groupby(site(cost, stage) for stage in members))) == len(
            {site(cost, one) for one in members}
        )
        assert length(members)[0] == min(length(order)[0] for order in permutations(members))
    whole = [length(order) for order in paths(cost, groups, None)]
    if whole:  # no location has to be split
        assert found
        for layout in found:
            members = [stage.members for stage in layout.stages]
            assert set(members) <= set(groups)
            assert length(members) == pytest.approx(min(whole), rel=1e-9)


@pytest.mark.parametrize("strategy", [LatencyPartitioning(), LocationPartitioning()])
@pytest.mark.parametrize("seed", range(4))
def test_the_same_plan_is_found_again_whatever_the_order_of_machines(
    strategy: PathPartitioning, seed: int
) -> None:
    topology = drawn(seed, 5)
    mixed = list(topology.contributors)
    random.Random(seed).shuffle(mixed)

    def names(machines: tuple[Contributor, ...]) -> list[list[list[str]]]:
        cost = costs(replace(topology, contributors=machines))
        return [
            [sorted(machines[member].name for member in stage.members) for stage in layout.stages]
            for layout in placed(strategy, SearchProblem(cost, 2, 1))
        ]

    assert names(topology.contributors) == names(topology.contributors)
    assert sorted(names(tuple(mixed))) == sorted(names(topology.contributors))


@pytest.mark.parametrize("seed", range(3))
def test_paths_over_many_machines_are_nearly_shortest(seed: int) -> None:
    count, stages = MOST_EXACT + 2, 4
    topology = drawn(seed, count)
    cost = costs(replace(topology, links=tuple(replace(link, bytes_per_s=1e8) for link in topology.links)))
    groups, strategy = [(index,) for index in range(count)], LatencyPartitioning()
    searches = []
    for is_exact in (False, True):
        run = PathSearch(cost, groups, strategy.lengths(cost, groups))
        assert not run.exact
        run.exact = is_exact
        (length,) = run.shortest(stages)[0].length
        searches.append(length)
    heuristic, exact = searches
    assert exact <= heuristic <= 1.1 * exact


def far(*machines: Contributor) -> Topology:
    """Return machines of sites: 1 ms inside a site, 80 ms between sites."""
    return Topology(
        machines,
        tuple(
            Link(one.id, other.id, *((1e-3, 1e8) if one.labels == other.labels else (0.08, 2e6)))
            for one, other in combinations(machines, 2)
        ),
    )


def at(name: str, place: str, gflops: float = 50, gib: float = 8) -> Contributor:
    return replace(machine(name, gflops, memory_bytes=int(gib * GIB)), labels={"location": place})


def test_locations_of_a_job_become_its_stages() -> None:
    topology = far(at("a", "rome"), at("b", "oslo"), at("c", "rome"), at("d", "oslo"))
    plan = make_plan(job(strategy="location", stages=2, microbatches=8), topology, PROFILE)
    stages = [sorted(member.name for member in stage.members) for stage in plan.stages]
    assert sorted(stages) == [["a", "c"], ["b", "d"]]
    assert plan.stages[0].members[0].standing.startswith("it works with the machines of its location")
    four = make_plan(job(strategy="location", stages=4), topology, PROFILE)
    order = [topology[stage.members[0].contributor_id].labels["location"] for stage in four.stages]
    assert len(list(groupby(order))) == 2
    pairs = make_plan(job(strategy="location", stages=2, members_per_stage=1), topology, PROFILE)
    assert len({topology[machine].labels["location"] for machine in pairs.machines}) == 1


def test_small_latencies_count_beside_cuts_between_locations() -> None:
    machines = [at(name, place) for name, place in zip("abcd", ("rome", "rome", "oslo", "oslo"), strict=True)]
    latencies = {"ac": 0.0804, "ad": 0.0803, "bc": 0.0802, "bd": 0.0801, "ab": 1e-4, "cd": 1e-4}
    topology = Topology(tuple(machines), tuple(Link(*pair, each, 1e8) for pair, each in latencies.items()))
    found = placed(LocationPartitioning(), SearchProblem(costs(topology), 4, 1))
    orders = {tuple(member for stage in layout.stages for member in stage.members) for layout in found}
    assert orders == {(0, 1, 3, 2), (2, 3, 1, 0)}


def test_machines_that_no_path_joins_have_no_partitions() -> None:
    topology = Topology((at("a", "rome"), at("b", "oslo")), (Link.dead("a", "b"),))
    for strategy in (LatencyPartitioning(), LocationPartitioning()):
        with pytest.raises(PlanInfeasible, match="no path over usable links joins 2 machines") as caught:
            strategy.partition(topology)
        assert caught.value.hint


def test_a_small_model_stays_in_one_location_and_on_one_machine() -> None:
    topology = far(at("a", "rome"), at("b", "oslo", 60), at("c", "rome"))
    plan = make_plan(job(strategy="location"), topology, PROFILE)
    assert len({topology[machine].labels["location"] for machine in plan.machines}) == 1
    assert {idle.name for idle in plan.idle} | {topology[one].name for one in plan.machines} == {
        "a",
        "b",
        "c",
    }
    alone = make_plan(job(strategy="latency"), topology, PROFILE)
    assert alone.machines == {"b"}


def test_memory_makes_a_location_several_stages() -> None:
    topology = far(at("a", "rome", gib=3), at("b", "rome", gib=3), at("c", "oslo", gib=0.5))
    plan = make_plan(job(strategy="location"), topology, PROFILE)
    assert plan.machines == {"a", "b"}
    assert len(plan.stages) == 2


@pytest.mark.parametrize("strategy", ["latency", "location"])
def test_what_does_not_fit_anywhere_is_refused_with_remedies(strategy: str) -> None:
    topology = far(at("a", "rome", gib=0.5), at("b", "oslo", gib=0.5))
    with pytest.raises(PlanInfeasible) as caught:
        make_plan(job(strategy=strategy), topology, PROFILE)
    assert caught.value.hint


@pytest.mark.parametrize("strategy", ["latency", "location"])
def test_deep_models_and_many_machines(strategy: str) -> None:
    deep = PROFILE.model_copy(update={"layers": PROFILE.layers[:1] * 240})
    topology = far(*(at(f"m{index}", f"site-{index % 7}", 30 + index, gib=32) for index in range(40)))
    plan = make_plan(job(strategy=strategy, stages=6, members_per_stage=1, microbatches=8), topology, deep)
    assert len(plan.stages) == 6
    assert plan.stages[-1].stop == 240


@pytest.mark.parametrize("strategy", ["latency", "location"])
def test_machines_without_a_speed_can_be_used(strategy: str) -> None:
    unmeasured = [
        replace(one, devices=(replace(one.device, flops_per_s={}),))
        for one in (at("a", "rome"), at("b", "rome"), at("c", "oslo"))
    ]
    plan = make_plan(job(strategy=strategy), far(*unmeasured), PROFILE)
    assert plan.prediction is None
    assert len(plan.machines) == 3
