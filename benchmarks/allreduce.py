"""Compare GB/s of share-compute's sums over 2 and 3 members with raw gloo and Ray's own gloo backend.

Two kinds of sums of share-compute are measured: allreduce, with each algorithm, and sums in a fixed order. All sides
run in the same actors and take turns, a few sums each, so that other load of the machine affects all of them. GB/s are
the bytes of the tensor divided by the seconds of one sum.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from _harness import print_figure, start_cluster

from share_compute.protocol.tree import Node, SummationTree
from share_compute_actors.transport.collective.backend import EpochGroup, join_group
from share_compute_actors.transport.rendezvous import Rendezvous

MIB = 2**20
SIZES_MIB = (1, 16, 64)
GOALS = {"raw gloo": 0.9, "ray.util.collective, gloo": 1.0}
ALGORITHMS: tuple[Literal["auto", "ring", "tree", "sharded"], ...] = ("auto", "ring", "tree", "sharded")
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smoke run: two turns")
    parser.add_argument("--turns", type=int, default=15, help="turns of each side")
    options = parser.parse_args()
    with start_cluster() as local:
        nodes = [local.add_node(num_cpus=1, object_store_memory=80 * MIB).node_id for _ in range(3)]
        for world in (2, 3):
            measure(nodes[:world], 2 if options.quick else options.turns)


if __name__ == "__main__":
    main()
