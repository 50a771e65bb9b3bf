"""Compare GB/s of share-compute's sums over 2 and 3 members with raw gloo and Ray's own gloo backend.

Two kinds of sums of share-compute are measured: allreduce, with each algorithm, and sums in a fixed order. All sides
run in the same actors and take turns, a few sums each, so that other load of the machine affects all of them. GB/s are
the bytes of the tensor divided by the seconds of one sum.

The algorithms of sums in a fixed order are then compared over one site of four members, and over two sites of two, each
in its own network namespace, with a slow link between them. This needs Linux and root, and is left out otherwise. The
peer of ``hierarchical`` is ``ring``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from _harness import print_figure, start_cluster

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.hosts.network import Host, Network, why_not

from share_compute.planning.cost.sums import traffic_of
from share_compute.protocol.collectives import ALGORITHMS as ORDERED
from share_compute.protocol.tree import Node, SummationTree
from share_compute_actors.transport.collective.backend import EpochGroup, join_group
from share_compute_actors.transport.rendezvous import Rendezvous

MIB = 2**20
SIZES_MIB = (1, 16, 64)
GOALS = {"raw gloo": 0.9, "ray.util.collective, gloo": 1.0}
ALGORITHMS: tuple[Literal["auto", "ring", "tree", "sharded"], ...] = ("auto", "ring", "tree", "sharded")
SLOW_S, SLOW_BYTES_PER_S = 0.01, 2.5e6
"""Delay one way, and rate, of the link between the two sites: 20 Mbit/s."""
TWO_SITES_GOAL = 1.5
"""Ratio of the times of ``ring`` and ``hierarchical`` over two sites of two. By bytes over the slow link it is 1.75."""
_TURN_BYTES = 64 * MIB
"""Bytes that one side sums in a turn, in at least 3 and at most 200 sums."""


def _sum(group: EpochGroup, tensor: torch.Tensor) -> None:
    group.start_allreduce(tensor)()


class Member:
    """One member of all groups."""

    def __init__(self, rank: int, world: int, store_file: str) -> None:
        from ray.util import collective

        torch.set_num_threads(1)
        dist: Any = torch.distributed
        device, store = torch.device("cpu"), dist.FileStore(store_file, world)
        self._sums: dict[str, Callable[[torch.Tensor], None]] = {}
        for algorithm in ALGORITHMS:
            meeting = Rendezvous(algorithm, (), 60.0, "127.0.0.1", algorithm)
            group = join_group(meeting, rank, world, device, dist.PrefixStore(algorithm, store))
            self._sums[algorithm] = partial(_sum, group)
        tree = SummationTree((1,) * world)
        held = [(Node(other, other + 1),) for other in range(world)]
        self._sums["in order"] = lambda tensor: group.start_tree_sum([tensor], held, tree)()
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - torch has no public name for it
        options._timeout = timedelta(seconds=60)  # noqa: SLF001
        options._threads = 2  # noqa: SLF001
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
        raw = dist.ProcessGroupGloo(dist.PrefixStore("raw", store), rank, world, options)
        self._sums["raw gloo"] = lambda tensor: raw.allreduce([tensor]).wait()
        collective.init_collective_group(world, rank, "GLOO", "ray")
        self._sums["ray.util.collective, gloo"] = lambda tensor: collective.allreduce(tensor, "ray")
        self._together = lambda: raw.barrier().wait()

    def turn(self, number: int, elements: int) -> dict[str, float]:
        """Let each side sum a few tensors, starting with another side in each turn; return seconds per sum by side."""
        tensor = torch.zeros(elements)
        times = min(200, max(3, _TURN_BYTES // tensor.nbytes))
        sides = list(self._sums.items())
        first = number % len(sides)
        seconds = {}
        for name, add in sides[first:] + sides[:first]:
            add(tensor)  # warm-up
            self._together()
            start = time.perf_counter()
            for _ in range(times):
                add(tensor)
            seconds[name] = (time.perf_counter() - start) / times
        return seconds


def measure(nodes: list[str], turns: int) -> None:
    """Measure all sides in turn with members on these nodes, and print the figures."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    world = len(nodes)
    store_file = str(Path(tempfile.mkdtemp()) / "store")
    members = [
        ray.remote(Member)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(rank, world, store_file)
        for rank, node in enumerate(nodes)
    ]
    for size in SIZES_MIB:
        found = [
            ray.get([member.turn.remote(number, size * MIB // 4) for member in members])
            for number in range(turns)
        ]
        seconds = [
            {name: max(result[name] for result in turn) for name in turn[0]} for turn in found
        ]  # maximum over the members: a sum is done when all of them have it
        speed = {name: [size * MIB / turn[name] / 1e9 for turn in seconds] for name in seconds[0]}
        others = {name: round(statistics.median(speed[name]), 3) for name in ALGORITHMS}
        for ours, figure in (("auto", "allreduce"), ("in order", "tree_sum")):
            for peer, goal in GOALS.items():
                pairs = zip(speed[ours], speed[peer], strict=True)
                print_figure(
                    figure,
                    ours=statistics.median(speed[ours]),
                    peer=statistics.median(speed[peer]),
                    peer_name=peer,
                    ratio=statistics.median(own / other for own, other in pairs),
                    unit="GB/s",
                    mebibytes=size,
                    members=world,
                    goal_ratio=goal,
                    turns=turns,
                    algorithms=others,
                )
    for member in members:
        ray.kill(member)


def measure_sites(hosts: Sequence[Host], sites: tuple[int, ...], size: int, turns: int) -> None:
    """Measure sums in a fixed order with each algorithm, with members of each site on one host, and print the figure.

    Args:
        hosts: host of each site.
        sites: site of each member.
        size: bytes of the tensor.
        turns: sums with each algorithm.
    """
    folder = tempfile.mkdtemp()
    script = str(Path(__file__).parent / "_site_member.py")
    members = []
    for rank, site in enumerate(sites):
        host = hosts[site]
        given = (str(rank), ",".join(map(str, sites)), host.address, folder, str(size // 4), str(turns))
        command = (*host.inside, sys.executable, script, *given)
        members.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    found = [json.loads(member.communicate(timeout=600)[0]) for member in members]
    assert all(each["is_equal"] for each in found)
    seconds = {
        name: statistics.median(map(max, zip(*(each["seconds"][name] for each in found), strict=True)))
        for name in ORDERED
    }
    crossing = {
        name: max(
            sum(
                times
                for (one, other), times in traffic_of(name, sites).items()
                if sites[one] == site != sites[other]
            )
            for site in set(sites)
        )
        for name in ORDERED
    }
    is_split = len(hosts) > 1
    print_figure(
        "two_sites_sum" if is_split else "one_site_sum",
        ours=seconds["hierarchical" if is_split else "sharded"],
        peer=seconds["ring"],
        peer_name="ring",
        ratio=seconds["ring"] / seconds["hierarchical" if is_split else "sharded"],
        unit="s",
        mebibytes=size / MIB,
        members=len(sites),
        goal_ratio=TWO_SITES_GOAL if is_split else 1.0,
        turns=turns,
        algorithms={name: round(value, 3) for name, value in seconds.items()},
        tensors_between_sites={name: round(value, 2) for name, value in crossing.items()},
    )


def measure_two_sites(turns: int) -> None:
    """Measure the algorithms over equal links, and over a slow link between two sites."""
    with ExitStack() as stack:
        network = stack.enter_context(Network())
        hosts = [network.add(), network.add()]
        measure_sites(hosts[:1], (0, 0, 0, 0), 16 * MIB, turns)
        stack.enter_context(hosts[0].slow(SLOW_S, SLOW_BYTES_PER_S))
        measure_sites(hosts, (0, 0, 1, 1), 4 * MIB, turns)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smoke run: two turns")
    parser.add_argument("--turns", type=int, default=15, help="turns of each side")
    parser.add_argument(
        "--sites-only", action="store_true", help="only the algorithms over one and two sites"
    )
    options = parser.parse_args()
    reason = why_not()
    if reason is None:
        measure_two_sites(2 if options.quick else min(5, options.turns))
    else:
        print(f"no figures over two sites: {reason}", file=sys.stderr)
    if options.sites_only:
        return
    with start_cluster() as local:
        nodes = [local.add_node(num_cpus=1, object_store_memory=80 * MIB).node_id for _ in range(3)]
        for world in (2, 3):
            measure(nodes[:world], 2 if options.quick else options.turns)


if __name__ == "__main__":
    main()
