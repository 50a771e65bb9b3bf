"""One member of the two-site measurement of `allreduce.py`: prints the seconds of sums with each algorithm as JSON."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from share_compute.protocol.collectives import ALGORITHMS, exchanges_directly, parts_of, routes
from share_compute.protocol.tree import Node, SummationTree
from share_compute_actors.transport.collective.algorithms import GlooLinks, start_sharded
from share_compute_actors.transport.collective.expression import expression
from share_compute_actors.transport.collective.routed import start_routed


def main(rank: int, sites: tuple[int, ...], address: str, folder: Path, elements: int, turns: int) -> None:
    """Join the group, let all algorithms take turns, and print the seconds of each sum, by algorithm."""
    torch.set_num_threads(1)
    dist: Any = torch.distributed
    world = len(sites)
    tree = SummationTree((1,) * world)
    held = [(Node(other, other + 1),) for other in range(world)]
    store = dist.FileStore(str(folder / "store"), world)
    options = dist.ProcessGroupGloo._Options()  # noqa: SLF001
    options._timeout = timedelta(seconds=300)  # noqa: SLF001
    options._threads = 2  # noqa: SLF001
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]  # noqa: SLF001
    group = dist.ProcessGroupGloo(store, rank, world, options)
    links = GlooLinks(group, rank, world)
    combine = expression(tree, [node for nodes in held for node in nodes])
    own = {
        algorithm: [parts_of(route, held, tree)[rank] for route in routes(algorithm, held, tree, sites)]
        for algorithm in ALGORITHMS
    }
    seconds: dict[str, list[float]] = {algorithm: [] for algorithm in ALGORITHMS}
    found = set()
    for turn in range(turns + 1):  # the first turn is a warm-up
        for algorithm in ALGORITHMS:
            tensor = torch.full((elements,), 0.1 * (rank + 1) ** 3)
            group.barrier().wait()
            start = time.perf_counter()
            if exchanges_directly(algorithm, sites):
                start_sharded(links, [tensor], [1] * world, combine, tensor)()
            else:
                start_routed(links, [tensor], own[algorithm], tensor)()
            taken_s = time.perf_counter() - start
            if turn:
                seconds[algorithm].append(taken_s)
            found.add(torch.unique(tensor).numpy().tobytes())
    print(json.dumps({"seconds": seconds, "is_equal": len(found) == 1}), flush=True)


if __name__ == "__main__":
    _, rank_, sites_, address_, folder_, elements_, turns_ = sys.argv
    main(int(rank_), tuple(map(int, sites_.split(","))), address_, Path(folder_), int(elements_), int(turns_))
