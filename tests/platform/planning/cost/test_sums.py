"""Predicted times and traffic of the algorithms that sum gradients."""

from __future__ import annotations

import numpy as np
import pytest

from share_compute.planning.cost.sums import GradientSums, traffic_of
from share_compute.planning.network.network import Network
from share_compute.protocol.collectives import ALGORITHMS, Algorithm, parts_of, routes, traffic
from share_compute.protocol.tree import SummationTree

LAN, WAN = (1e-3, 1e8), (2e-2, 1e6)
GRADIENT = 1e7


def network(*sites: int) -> Network:
    """Return machines at some sites, with fast links inside a site and slow ones between sites."""
    count = max(sites) + 1
    latency_s, bytes_per_s = np.full((count, count), WAN[0]), np.full((count, count), WAN[1])
    np.fill_diagonal(latency_s, LAN[0])
    np.fill_diagonal(bytes_per_s, LAN[1])
    return Network(np.array(sites), latency_s, bytes_per_s)


def predicted(*sites: int, is_compressed: bool = False) -> dict[Algorithm, float]:
    sums = GradientSums(network(*sites), "auto", is_compressed=is_compressed)
    return {time.algorithm: time.of(GRADIENT) for time in sums.all(range(len(sites)), "cpu")}


@pytest.mark.parametrize("count", range(2, 34))
def test_the_traffic_of_a_ring_is_that_of_its_routes(count: int) -> None:
    tree = SummationTree((1,) * count)
    held = [(node,) for node in tree.sums_of_runs]
    sites = (0,) * count
    counted = traffic(parts_of(route, held, tree) for route in routes("ring", held, tree, sites))
    assert traffic_of("ring", sites) == pytest.approx(counted)


def test_at_one_site_sharded_is_the_fastest() -> None:
    found = predicted(0, 0, 0, 0)
    assert found["sharded"] == found["hierarchical"] == pytest.approx(2 * LAN[0] + 1.5 * GRADIENT / LAN[1])
    assert found["ring"] == pytest.approx(6 * LAN[0] + 2.0 * GRADIENT / LAN[1])
    assert found["tree"] == pytest.approx(4 * LAN[0] + 2.0 * GRADIENT / LAN[1])
    assert (
        GradientSums(network(0, 0), "auto", is_compressed=False).best((0, 1), "cpu", 1.0).algorithm
        == "sharded"
    )


def test_between_two_sites_hierarchical_is_the_fastest() -> None:
    found = predicted(0, 0, 1, 1)
    # The latencies: to the representative, to the other site, back, and to the others.
    assert found["hierarchical"] == pytest.approx(2 * (LAN[0] + WAN[0]) + GRADIENT / WAN[1])
    assert found["sharded"] == pytest.approx(2 * WAN[0] + 2.0 * GRADIENT / WAN[1])
    assert found["ring"] == pytest.approx(
        2 * (LAN[0] * 2 + WAN[0] * 2) - LAN[0] - WAN[0] + 1.75 * GRADIENT / WAN[1]
    )
    best = GradientSums(network(0, 0, 1, 1), "auto", is_compressed=False).best(range(4), "cpu", GRADIENT)
    assert (best.algorithm, best.crossing) == ("hierarchical", 1.0)


def test_compressed_runs_cross_between_sites_once() -> None:
    found = predicted(0, 0, 1, 1, is_compressed=True)
    assert found["hierarchical"] == pytest.approx(2 * LAN[0] + WAN[0] + 2 * GRADIENT / WAN[1])
    assert found["sharded"] == pytest.approx(WAN[0] + 4 * GRADIENT / WAN[1])
    assert found["ring"] == pytest.approx(WAN[0] * 2 + LAN[0] + 3 * GRADIENT / WAN[1])


@pytest.mark.parametrize("wanted", ALGORITHMS)
def test_the_job_may_name_the_algorithm_except_on_gpus(wanted: Algorithm) -> None:
    sums = GradientSums(network(0, 1), wanted, is_compressed=False)
    assert sums.best((0, 1), "cpu", GRADIENT).algorithm == wanted
    assert sums.best((0, 1), "cuda", GRADIENT).algorithm == "sharded"


def test_a_dead_link_takes_for_ever() -> None:
    links = network(0, 1)
    links.bytes_per_s[0, 1] = links.bytes_per_s[1, 0] = 0.0
    sums = GradientSums(links, "auto", is_compressed=False)
    assert [time.of(0.0) for time in sums.all((0, 1), "cpu")] == [float("inf")] * 4
