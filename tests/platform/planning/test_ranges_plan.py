"""Numbers and places of ranges of the weights."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from tests.platform.planning.models import PROFILE, job, machine

from share_compute.planning.ranges import merge_s, range_machines, ranges_of, with_ranges
from share_compute.planning.rounds import plan_rounds
from share_compute.topology import Link, Topology

NAMES = "abcd"


def topology(server: float, machines: float) -> Topology:
    """Return four machines with these bandwidths to the server and to each other, in bytes/s."""
    links = [Link(one, other, 0.01, machines) for one, other in permutations(NAMES, 2)]
    links += [Link(*ends, 0.01, server) for name in NAMES for ends in (("head", name), (name, "head"))]
    return Topology(tuple(machine(name, 50) for name in NAMES), tuple(links))


def spec(**options: Any) -> Any:
    policy = {"kind": "local", "branches": 4, "every": 20, **options}
    return job(training={"steps": 1_000, "synchronization": policy})


def test_auto_merges_on_machines_if_the_link_of_the_server_is_slow() -> None:
    slow = topology(1e6, 1e8)
    chosen = ranges_of(spec(servers="auto"), slow, PROFILE)
    assert with_ranges(spec(servers="auto"), chosen) == spec(servers=chosen)
    assert chosen == 4
    alone_s, shared_s = (merge_s(spec(), slow, PROFILE, count) for count in (0, chosen))
    assert alone_s is not None
    assert shared_s is not None
    assert shared_s < 0.02 * alone_s
    _, figures, _ = plan_rounds(spec(servers="auto"), slow, PROFILE)
    assert figures.range_machines == ("a", "b", "c", "d")
    assert figures.merge_s == shared_s


def test_auto_merges_on_the_server_if_its_link_is_fast_or_unknown() -> None:
    unknown = Topology(topology(1e8, 1e6).contributors)
    for each in (topology(1e8, 1e6), unknown):
        assert ranges_of(spec(servers="auto"), each, PROFILE) == 0
        assert plan_rounds(spec(servers="auto"), each, PROFILE)[1].range_machines == ()
    assert ranges_of(spec(servers=3), unknown, PROFILE) == 3
    assert with_ranges(spec(), 3) == spec()


def test_the_data_of_a_merge_is_divided_among_the_ranges() -> None:
    """Each machine is the server of one range and the backup of another; it sends and receives at the same time."""
    slow = topology(1e6, 1e7)
    alone_s = merge_s(spec(), slow, PROFILE, 0)
    shared_s = merge_s(spec(), slow, PROFILE, 4)
    assert alone_s is not None
    # Alone, the server moves 4 contributions and 4 updates of all weights. With ranges, each machine moves data of a
    # fourth of the weights: it receives 8 contributions, sends 4 at the same time, and then sends 5 updates.
    assert shared_s == pytest.approx(alone_s * 13 / 8 / 4 / 10)


def test_a_machine_counts_with_all_ranges_that_it_gets() -> None:
    slow = topology(1e6, 1e7)
    two = Topology(slow.contributors[:2], slow.links)
    alone_s = merge_s(spec(), two, PROFILE, 0)
    assert alone_s is not None
    # Each of two machines has all ranges, half of them as the server, whatever their number.
    for ranges in (2, 4, 8):
        assert merge_s(spec(), two, PROFILE, ranges) == pytest.approx(alone_s * (4 + 5 / 2) / 8 / 10)
    # The server of a single range has no traffic of a backup.
    assert merge_s(spec(), two, PROFILE, 1) == pytest.approx(alone_s * (4 + 5) / 8 / 10)
    only = Topology(slow.contributors[:1], slow.links)
    assert merge_s(spec(), only, PROFILE, 1) == pytest.approx(alone_s * (4 + 5) / 8 / 10)


def test_the_server_is_as_fast_as_all_machines_that_limit_their_links_together() -> None:
    """Four machines of 10 MB/s each load the server's link with 40 MB/s, so it is not the bottleneck."""
    equal = topology(1e7, 1e7)
    assert ranges_of(spec(servers="auto"), equal, PROFILE) == 0
    slow_s, equal_s = (merge_s(spec(), each, PROFILE, 0) for each in (topology(1e7, 1e8), equal))
    assert slow_s is not None
    assert equal_s == pytest.approx(slow_s / 4)
    limited = tuple(
        replace(each, upload_bytes_per_s=1e7, download_bytes_per_s=1e7) for each in equal.contributors
    )
    assert merge_s(spec(), Topology(limited, topology(1e7, 1e8).links), PROFILE, 0) == equal_s


def test_machines_that_send_fastest_come_first() -> None:
    equal = topology(1e7, 1e7)
    limited = tuple(
        replace(each, upload_bytes_per_s=1e6) if each.id == "b" else each for each in equal.contributors
    )
    links = (*(link for link in equal.links if link.source != "d"), Link("d", "a", 0.01, 5e7))
    assert range_machines(Topology(limited, links)) == ("d", "a", "c", "b")
