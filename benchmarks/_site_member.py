"""One member of the two-site measurement of `allreduce.py`: prints the seconds of sums with each algorithm as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from share_compute.protocol.collectives import ALGORITHMS
from share_compute.protocol.tree import Node, SummationTree
from share_compute_actors.transport.collective.backend import join_group
from share_compute_actors.transport.rendezvous import Rendezvous


def main(rank: int, sites: tuple[int, ...], address: str, folder: Path, elements: int, turns: int) -> None:
    """Join a group for each algorithm, let them take turns, and print the seconds of each sum, by algorithm."""
    torch.set_num_threads(1)
    dist: Any = torch.distributed
    world = len(sites)
    tree = SummationTree((1,) * world)
    held = [(Node(other, other + 1),) for other in range(world)]
    store = dist.FileStore(str(folder / "store"), world)
    groups = {}
    for algorithm in ALGORITHMS:
        meeting = Rendezvous(algorithm, (), 120.0, address, algorithm, sites)
        groups[algorithm] = join_group(
            meeting, rank, world, torch.device("cpu"), dist.PrefixStore(algorithm, store)
        )
    seconds: dict[str, list[float]] = {algorithm: [] for algorithm in ALGORITHMS}
    digest = set()
    for turn in range(turns + 1):  # the first turn is a warm-up
        for algorithm, group in groups.items():
            tensor = torch.full((elements,), 0.1 * (rank + 1) ** 3)
            group.barrier()
            start = time.perf_counter()
            group.start_tree_sum([tensor], held, tree)()
            group.barrier()
            if turn:
                seconds[algorithm].append(time.perf_counter() - start)
            digest.add(float(tensor[0]))
    print(json.dumps({"seconds": seconds, "is_equal": len(digest) == 1}), flush=True)


if __name__ == "__main__":
    _, rank_, sites_, address_, folder_, elements_, turns_ = sys.argv
    main(int(rank_), tuple(map(int, sites_.split(","))), address_, Path(folder_), int(elements_), int(turns_))
