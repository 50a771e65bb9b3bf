"""Branches: the islands on which they are placed, and the number of branches on each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.platform.planning.fleets import fleet
from tests.platform.planning.models import GIB, PROFILE, job, lan, machine

from share_compute.errors import PlanInfeasible
from share_compute.models.profiles.profile import LayerProfile, ModelProfile
from share_compute.planning.branches import (
    BranchPlace,
    can_hold,
    contribution_bytes,
    exchange_s,
    idle_machines,
    island_topology,
    neighbours,
    place_branches,
    uncompressed_bytes,
)
from share_compute.planning.plan import NOT_MEASURED
from share_compute.planning.planner import solve
from share_compute.specification import TrainJob
from share_compute.topology import HEAD, Contributor, Link, Topology


def local(branches: int, *, compression: dict[str, Any] | None = None, **options: Any) -> TrainJob:
    """Return a job with rounds of 20 steps."""
    policy = {"kind": "local", "branches": branches, "every": 20, **options}
    return job(training={"synchronization": policy, "compression": compression or {"name": "none"}})


def sites(*of: tuple[Contributor, ...], to_server: float = 1e9) -> Topology:
    """Return machines of several sites: 100 MB/s inside a site, and 1 MB/s between sites."""
    site = {each.id: place for place, machines in enumerate(of) for each in machines}
    names = list(site)
    links = [
        Link(one, other, *((5e-4, 1e8) if site[one] == site[other] else (0.03, 1e6)))
        for place, one in enumerate(names)
        for other in names[place + 1 :]
    ]
    links += [Link(HEAD, name, 0.03, to_server) for name in names]
    return Topology(tuple(each for machines in of for each in machines), tuple(links))


TWO_SITES = sites(tuple(map(machine, "abc")), tuple(map(machine, "def")))


def test_equal_machines_of_two_sites_are_two_islands() -> None:
    one, other = place_branches(local(2), TWO_SITES, PROFILE)
    assert (one.machines, one.branches) == (("a", "b", "c"), (0,))
    assert (other.machines, other.branches) == (("d", "e", "f"), (1,))
    planned = solve(local(2), island_topology(TWO_SITES, one), PROFILE, 0, {}).plan.prediction
    assert planned is not None
    assert one.step_s == other.step_s == pytest.approx(planned.step_s, rel=0.1)
    assert idle_machines(TWO_SITES, (one, other)) == ()


def test_as_many_branches_as_equal_machines_get_a_machine_each() -> None:
    places = place_branches(local(6), TWO_SITES, PROFILE)
    assert [place.machines for place in places] == [(name,) for name in "abcdef"]
    assert [place.branches for place in places] == [(number,) for number in range(6)]


def test_a_slow_machine_gets_fewer_branches_or_none() -> None:
    topology = sites((machine("fast", 60, memory_bytes=64 * GIB),), (machine("slow", 15),))
    fast, slow = place_branches(local(4), topology, PROFILE)
    assert (fast.machines, fast.branches) == (("fast",), (0, 1, 2))
    assert (slow.machines, slow.branches) == (("slow",), (3,))
    assert slow.step_s > 3 * fast.step_s
    (only,) = place_branches(local(2), topology, PROFILE)
    assert only == BranchPlace(("fast",), (0, 1), fast.step_s)
    (idle,) = idle_machines(topology, (only,))
    assert (idle.contributor_id, idle.reason) == (
        "slow",
        "rounds would not be shorter if it trained a branch",
    )


def test_a_slow_link_to_the_server_costs_branches() -> None:
    topology = sites(*((machine(name, memory_bytes=64 * GIB),) for name in "ab"), to_server=3e7)
    near = tuple(replace(link, bytes_per_s=1e9) if link.target == "a" else link for link in topology.links)
    first, second = place_branches(local(6, every=1), replace(topology, links=near), PROFILE)
    assert (len(first.branches), len(second.branches)) == (4, 2)


def test_an_island_without_memory_for_more_branches_gets_no_more() -> None:
    # One branch needs about 3 GB.
    topology = sites(
        (machine("large", 10, memory_bytes=64 * GIB),), (machine("small", memory_bytes=5 * GIB),)
    )
    large, small = place_branches(local(4), topology, PROFILE)
    assert (large.machines, large.branches) == (("large",), (0, 1, 2))
    assert (small.machines, small.branches) == (("small",), (3,))


def test_machines_that_can_hold_the_model_only_together_are_one_island() -> None:
    topology = sites(
        tuple(machine(name, memory_bytes=3 * GIB) for name in "ab"),
        tuple(machine(name, memory_bytes=3 * GIB) for name in "cd"),
    )
    with pytest.raises(PlanInfeasible):
        place_branches(local(1), Topology(topology.contributors[:1]), PROFILE)
    assert not can_hold(local(1), Topology(topology.contributors[:1]), PROFILE)
    assert can_hold(local(1), topology, PROFILE)
    places = place_branches(local(2), topology, PROFILE)
    assert [place.machines for place in places] == [("a", "b"), ("c", "d")]


def test_what_does_not_fit_says_how_many_branches_do() -> None:
    topology = lan(machine("a", memory_bytes=5 * GIB), machine("b", memory_bytes=5 * GIB))
    with pytest.raises(PlanInfeasible, match="can hold 2 of the 5 branches at the same time") as error:
        place_branches(local(5), topology, PROFILE)
    assert "set training.synchronization.branches to at most 2" in str(error.value.hint)
    place_branches(local(2), topology, PROFILE)
    with pytest.raises(PlanInfeasible, match="of lent memory and these machines lend") as error:
        place_branches(local(2), lan(machine("a", memory_bytes=GIB // 4)), PROFILE)
    assert error.value.hint


def test_only_measured_machines_are_used_if_there_are_some() -> None:
    topology = sites((machine("a"), machine("b", 0.0)))
    (place,) = place_branches(local(1), topology, PROFILE)
    assert place.machines == ("a",)
    assert [each.reason for each in idle_machines(topology, (place,))] == [NOT_MEASURED]
    unknown = lan(machine("a", 0.0), machine("b", 0.0))
    places = place_branches(local(2), unknown, PROFILE)
    assert [place.machines for place in places] == [("a",), ("b",)]


@given(seed=st.integers(0, 10**6), count=st.integers(1, 6), branches=st.integers(1, 9))
@settings(max_examples=15, deadline=None)
def test_each_branch_is_on_one_island(seed: int, count: int, branches: int) -> None:
    topology = fleet(seed, count)
    spec = local(branches)
    try:
        places = place_branches(spec, topology, PROFILE)
    except PlanInfeasible:
        return
    assert places == place_branches(spec, topology, PROFILE)
    assert [number for place in places for number in place.branches] == list(range(branches))
    assert all(place.branches and place.machines and place.step_s > 0 for place in places)
    machines = [name for place in places for name in place.machines]
    idle = [each.contributor_id for each in idle_machines(topology, places)]
    assert sorted([*machines, *idle]) == sorted(each.id for each in topology.contributors)
    for place in places:
        # The plan for one of the island's branches fits.
        solve(spec, island_topology(topology, place), PROFILE, 0, {})


@pytest.mark.parametrize("strategy", ["latency", "location"])
@pytest.mark.parametrize("seed", range(8))
def test_the_time_of_a_step_is_that_of_the_strategys_plan(strategy: str, seed: int) -> None:
    topology = fleet(seed, 4)
    spec = job(
        microbatches=None,
        strategy=strategy,
        training={"batch_size": 8, "synchronization": {"kind": "local", "branches": 1, "every": 20}},
    )
    try:
        (place,) = place_branches(spec, topology, PROFILE)
    except PlanInfeasible:
        return
    prediction = solve(spec, island_topology(topology, place), PROFILE, 0, {}).plan.prediction
    assert prediction is not None
    assert place.step_s == prediction.step_s


def test_the_topology_of_an_island_divides_the_memory() -> None:
    part = island_topology(TWO_SITES, BranchPlace(("a", "c"), (0, 1, 2), 1.0))
    assert [each.id for each in part.contributors] == ["a", "c"]
    assert {each.memory_bytes for each in part.contributors} == {8 * GIB // 3}
    assert {(link.source, link.target) for link in part.links} == {("a", "c"), (HEAD, "a"), (HEAD, "c")}


def test_contributions_are_counted_as_the_codec_writes_them() -> None:
    trained = LayerProfile(parameters=8_500, largest=4_096)
    profile = ModelProfile(layers=(trained, LayerProfile(parameters=9_000, frozen=9_000)))
    assert uncompressed_bytes(profile) == 4 * 8_500
    assert contribution_bytes(local(2).training, profile) == 4 * 8_500
    assert contribution_bytes(local(2, compression={"name": "bf16"}).training, profile) == 2 * 8_500
    # Two matrices of 64 x 64, one of 17 x 18, and two values.
    low_rank = local(2, compression={"name": "powersgd", "rank": 2}).training
    assert contribution_bytes(low_rank, profile) == 4 * (2 * 2 * (64 + 64) + 2 * (17 + 18) + 2)
    sparse = {"name": "topk", "density": 64 / 4096, "chunk": 4096, "values": "int2"}
    big = ModelProfile(layers=(LayerProfile(parameters=2**24, largest=2**20),))
    assert contribution_bytes(local(2, compression=sparse).training, big) < uncompressed_bytes(big) / 100


def test_an_exchange_takes_the_slowest_link_to_the_server() -> None:
    links = [Link(HEAD, "a", 0.1, 1e6), Link("b", HEAD, 0.2, 2e6), Link("a", "b", 0.5, 1e3)]
    topology = Topology((machine("a"), machine("b")), tuple(links))
    assert exchange_s(topology, ("a", "b"), 1e6) == pytest.approx(2 * 0.2 + 1)
    assert exchange_s(topology, ("b",), 1e6) == pytest.approx(2 * 0.2 + 0.5)
    unlinked = Topology(topology.contributors, (links[2], Link.dead("a", "c")))
    assert exchange_s(unlinked, ("a",), 1e3) == pytest.approx(2 * 0.5 + 1)
    assert exchange_s(Topology(topology.contributors), ("a",), 1e3) == 0


def test_neighbours_are_joined_by_the_fastest_links() -> None:
    """Two islands with two branches each, and a third one that is nearer to the second than to the first."""
    topology = Topology((), (Link("a", "b", 0.05, 1e6), Link("c", "b", 0.02, 1e6), Link("a", "c", 0.09, 1e6)))
    places = [
        BranchPlace(("a",), (0, 3), 1.0),
        BranchPlace(("b",), (1, 4), 1.0),
        BranchPlace(("c",), (2,), 1.0),
    ]
    assert neighbours(topology, places) == [(0, 1), (0, 3), (1, 2), (1, 4)]
    assert neighbours(Topology((), ()), places) == [(0, 1), (0, 2), (0, 3), (1, 4)]


def test_a_job_without_rounds_has_no_branches() -> None:
    with pytest.raises(ValueError, match="synchronization allreduce has no branches"):
        place_branches(job(), TWO_SITES, PROFILE)
