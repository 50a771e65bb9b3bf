"""From sampled links to all links: regions are found again, and no measured link is assumed to be better."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from share_compute.planning.network.network import Network
from share_compute.planning.network.regions import (
    ASSUMED_BYTES_PER_S,
    HOST_BYTES_PER_S,
    MOST_REGIONS,
    complete,
)
from share_compute.topology import HEAD, Contributor, Device, Link, Topology

DEVICE = Device("cpu", "cpu", 2**34, {"float32": 1e11}, 1e10)


def machine(index: int, address: str = "") -> Contributor:
    return Contributor(f"m{index}", f"machine-{index}", (DEVICE,), address=address)


def stage(count: int, *links: tuple[str, str, float, float], addresses: Sequence[str] = ()) -> Topology:
    machines = tuple(machine(index, addresses[index] if addresses else "") for index in range(count))
    return Topology(machines, tuple(Link(*link) for link in links))


class World:
    """Machines in known regions, each measured to the head and to some others, with noise."""

    def __init__(self, seed: int, regions: int, machines: int, peers: int, noise: float = 0.2) -> None:
        self.dice = random.Random(seed)
        self.noise = noise
        self.home = [index % regions for index in range(machines)]
        inside = [(2e-4 * 4 ** (number % 3), 1e9 / 8 ** (number % 2)) for number in range(regions)]
        self.truth = {
            (one, other): inside[one]
            if one == other
            else (0.01 * (1 + abs(one - other)), 2e7 / (1 + abs(one - other)))
            for one in range(regions)
            for other in range(regions)
        }
        links: list[Link] = []
        for index in range(machines):
            links.append(self.measured(f"m{index}", HEAD, self.home[index], 0))
            others = [
                other
                for other in self.dice.sample(range(machines), min(machines, peers + 1))
                if other != index
            ]
            links += [
                self.measured(f"m{index}", f"m{other}", self.home[index], self.home[other])
                for other in others[:peers]
            ]
        self.topology = Topology(tuple(machine(index) for index in range(machines)), tuple(links))

    def measured(self, source: str, target: str, one: int, other: int) -> Link:
        latency_s, rate = self.truth[one, other]
        return Link(source, target, latency_s * self.jitter(), rate * self.jitter())

    def jitter(self) -> float:
        return 1 + self.dice.uniform(-self.noise, self.noise)


def groups(network: Network) -> set[frozenset[int]]:
    found: dict[int, set[int]] = {}
    for index, region in enumerate(network.region):
        found.setdefault(int(region), set()).add(index)
    return {frozenset(members) for members in found.values()}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("regions", "machines"), [(1, 6), (2, 30), (3, 60)])
def test_regions_are_found_again(seed: int, regions: int, machines: int) -> None:
    world = World(seed, regions, machines, peers=4)
    network = complete(world.topology)
    assert not network.assumed
    expected: dict[int, set[int]] = {}
    for index, home in enumerate(world.home):
        expected.setdefault(home, set()).add(index)
    assert groups(network) == {frozenset(members) for members in expected.values()}
    for one in range(0, machines, 7):
        for other in range(1, machines, 5):
            if one != other:
                latency_s, rate = world.truth[world.home[one], world.home[other]]
                found = network.link(one, other)
                assert found[0] == pytest.approx(latency_s, rel=0.25)
                assert found[1] == pytest.approx(rate, rel=0.25)


@pytest.mark.parametrize("seed", range(8))
def test_few_samples_of_many_regions_misplace_next_to_nobody(seed: int) -> None:
    """A machine of which no link inside its region was sampled may look like one of the region beside it."""
    world = World(seed, regions=5, machines=100, peers=4)
    network = complete(world.topology)
    at_home = sum(
        max(sum(1 for index in members if world.home[index] == home) for home in range(5))
        for members in groups(network)
    )
    assert at_home >= 97
    assert len(groups(network)) <= 7


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), regions=st.integers(1, 4), machines=st.integers(1, 14))
def test_the_order_of_links_does_not_matter(seed: int, regions: int, machines: int) -> None:
    topology = World(seed, regions, machines, peers=3, noise=0.9).topology
    shuffled = list(topology.links)
    random.Random(seed).shuffle(shuffled)
    turned = tuple(
        Link(link.target, link.source, link.latency_s, link.bytes_per_s) if place % 2 else link
        for place, link in enumerate(shuffled)
    )
    first, second = complete(topology), complete(Topology(topology.contributors, turned))
    assert first.region.tolist() == second.region.tolist()
    assert np.array_equal(first.latency_s, second.latency_s)
    assert np.array_equal(first.bytes_per_s, second.bytes_per_s)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["head", "m0", "m1", "m2", "m3", "nobody"]),
            st.sampled_from(["head", "m0", "m1", "m2", "m3", "nobody"]),
            st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 1),
            st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 1e10),
        ),
        max_size=12,
    )
)
@example([("head", "m0", 0.0, -0.0), ("m1", "m2", math.inf, 1.0)])
@example([("m0", "m1", 0.0, -0.0)])
def test_whatever_was_measured_the_network_is_sound(links: list[tuple[str, str, float, float]]) -> None:
    network = complete(stage(4, *links))
    count = int(network.region.max()) + 1
    for table in (network.latency_s, network.bytes_per_s):
        assert table.shape == (count, count)
        assert np.isfinite(table).all()
        assert (table >= 0).all()
        assert np.array_equal(table, table.T)
    assert sorted(set(network.region.tolist())) == list(range(count))


def test_the_worse_of_both_directions_counts() -> None:
    network = complete(stage(2, ("m0", "m1", 0.010, 5e6), ("m1", "m0", 0.002, 1e6), ("m0", "m1", 0.001, 9e9)))
    assert network.link(0, 1) == network.link(1, 0) == (0.010, 1e6)


def test_without_any_measurement_a_lan_is_assumed() -> None:
    network = complete(stage(3))
    assert network.assumed
    assert network.link(0, 2)[1] == ASSUMED_BYTES_PER_S
    assert not complete(stage(1)).assumed  # nothing is sent, so nothing is assumed


def test_no_contributors_at_all() -> None:
    assert complete(Topology(())).region.shape == (0,)


def test_unmeasured_pairs_go_over_the_best_path() -> None:
    network = complete(
        stage(
            3,
            ("m0", HEAD, 0.010, 1e7),
            ("m1", HEAD, 0.100, 1e6),
            ("m2", HEAD, 0.500, 1e5),
        )
    )
    assert network.link(0, 1) == pytest.approx((0.110, 1e6))
    assert network.link(1, 2) == pytest.approx((0.600, 1e5))


def test_a_disconnected_part_gets_nothing_through() -> None:
    network = complete(stage(5, ("m0", "m1", 1e-3, 1e8), ("m2", "m3", 1e-3, 1e8)))
    assert network.link(0, 1)[1] == network.link(2, 3)[1] == 1e8
    assert network.link(0, 2)[1] == network.link(1, 3)[1] == 0
    assert network.transfer_s(0, 2, 1.0) == math.inf
    assert network.link(4, 0)[1] == network.link(4, 3)[1] == 0, "no link of it was measured"


def test_a_dead_link_stays_dead_though_the_head_reaches_both() -> None:
    network = complete(stage(2, ("m0", "m1", 0.5, 0.0), ("m0", HEAD, 1e-3, 1e8), ("m1", HEAD, 1e-3, 1e8)))
    assert network.link(0, 1)[1] == 0


def test_one_machine_behind_a_dead_link_does_not_spoil_its_neighbours() -> None:
    lan = [("m0", "m1", 1e-3, 1e8), ("m0", "m2", 1e-3, 1e8), ("m1", "m2", 1e-3, 1e8)]
    dead = [(f"m{index}", "m3", 1.0, 0.0) for index in range(3)]
    network = complete(stage(4, *lan, *dead))
    assert len({int(region) for region in network.region[:3]}) == 1
    assert network.link(0, 1)[1] == 1e8
    assert network.link(0, 3)[1] == 0


def test_a_machine_on_wireless_gets_a_region_of_its_own() -> None:
    lan = [(f"m{one}", f"m{other}", 3e-4, 1.1e8) for one in range(3) for other in range(one)]
    wireless = [("m3", f"m{other}", 4e-3, 6e6) for other in range(3)]
    network = complete(stage(4, *lan, *wireless))
    assert groups(network) == {frozenset({0, 1, 2}), frozenset({3})}
    assert network.link(3, 1) == (4e-3, 6e6)


def test_the_machine_that_the_head_runs_on_is_like_its_neighbours() -> None:
    lan = [(f"m{one}", f"m{other}", 1e-3, 1.1e8) for one in range(3) for other in range(one)]
    heads = [("m0", HEAD, 1e-4, 3e9), ("m1", HEAD, 1e-3, 1.1e8), ("m2", HEAD, 1e-3, 1.1e8)]
    assert len(groups(complete(stage(3, *lan, *heads)))) == 1


class TestHosts:
    """Machines at one address."""

    def test_they_are_joined_to_everything_alike(self) -> None:
        links = [("m0", "m2", 1e-2, 1e7), ("m0", "m1", 1e-4, 3e9)]
        network = complete(stage(4, *links, addresses=["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2"]))
        assert network.link(1, 3) == network.link(0, 2) == (1e-2, 1e7)

    def test_alone_they_reach_each_other_as_measured(self) -> None:
        network = complete(stage(2, ("m0", "m1", 1e-4, 3e9), addresses=["10.0.0.1", "10.0.0.1"]))
        assert network.link(0, 1) == (1e-4, 3e9)
        unmeasured = complete(stage(2, ("m0", HEAD, 1e-2, 1e7), addresses=["10.0.0.1", "10.0.0.1"]))
        assert unmeasured.link(0, 1)[1] == HOST_BYTES_PER_S

    def test_two_of_a_lan_share_a_region_with_its_links(self) -> None:
        hosts = ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2"]
        links = [("m0", "m1", 1e-4, 3e9), ("m2", "m3", 1e-4, 3e9), ("m1", "m2", 1e-3, 1e8)]
        network = complete(stage(4, *links, addresses=hosts))
        assert len(groups(network)) == 1
        assert network.link(0, 1) == (1e-3, 1e8), "the worse one, for all"


@pytest.mark.thorough
def test_ten_thousand_machines_take_seconds() -> None:
    world = World(1, regions=12, machines=10_000, peers=4)
    begin = time.process_time()
    network = complete(world.topology)
    assert time.process_time() - begin < 20
    assert len(network.latency_s) <= MOST_REGIONS
    sampled = random.Random(2).sample(range(10_000), 400)
    pairs = list(zip(sampled[::2], sampled[1::2], strict=True))
    good = sum(
        abs(math.log(network.link(one, other)[1] / world.truth[world.home[one], world.home[other]][1])) < 0.7
        for one, other in pairs
    )
    assert good >= 0.95 * len(pairs)


@pytest.mark.parametrize("most", [2, 3, 4])
def test_as_many_regions_as_the_tables_hold_all_keep_their_links(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr("share_compute.planning.network.regions.MOST_REGIONS", most)
    inside = [(f"m{index}", f"m{index + 1}", 1e-4, 1e9) for index in range(0, 2 * most, 2)]
    between = [(f"m{index}", f"m{index + 2}", 0.1, 1e6) for index in range(0, 2 * most - 2, 2)]
    network = complete(stage(2 * most, *inside, *between))
    assert len(network.latency_s) == most
    for index in range(0, 2 * most, 2):
        assert network.link(index, index + 1)[1] == pytest.approx(1e9)


def test_machines_that_are_all_different_still_fit_the_tables() -> None:
    links = [
        (f"m{index}", f"m{index + 1}", 1e-3 * 1.5 ** (index % 25), 1e9 / 1.7 ** (index % 31))
        for index in range(599)
    ]
    network = complete(stage(600, *links))
    assert len(network.latency_s) <= MOST_REGIONS
    strangers = [(f"m{index}", f"m{index + 1}", 1e-3, 1e8) for index in range(0, 600, 2)]
    network = complete(stage(600, *strangers))
    assert len(network.latency_s) <= MOST_REGIONS
    assert network.link(0, 1)[1] == 1e8
    assert network.link(0, 2)[1] == 0
