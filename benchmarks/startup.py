"""Measure the seconds from `share-compute up` to the first training step, and the memory of an idle contributor.

The peer is a goal, since no rival starts the same things: 60 s on two cores, and 500 MiB for an idle machine.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import psutil
from _harness import print_figure

from share_compute_actors.machine.run_folders import close_run_folder, open_run_folder
from share_compute_api.demonstration.cluster import LocalCluster
from share_compute_api.demonstration.corpus import gather_corpus
from share_compute_api.demonstration.job import write_job

GOAL_S = 60.0
GOAL_BYTES = 500 * 2**20


def memory_of(name: str) -> int:
    """Return the memory in bytes of a contributor's agent and all its children (proportional set size)."""
    agent = next(
        process
        for process in psutil.Process().children(recursive=True)
        if "join" in process.cmdline() and name in process.cmdline()
    )
    return sum(process.memory_full_info().pss for process in [agent, *agent.children(recursive=True)])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one contributor instead of three")
    options = parser.parse_args()
    names = [f"machine-{number}" for number in range(1, 2 if options.quick else 4)]
    membership = open_run_folder(f"benchmark {os.getpid()}")
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "texts"
        texts.mkdir()
        cluster = LocalCluster(membership, Path(folder) / "server", [texts])
        try:
            begin = time.monotonic()
            client = cluster.start()
            up = time.monotonic()
            for name in names:
                cluster.join(client, name, memory="1GiB")
            cluster.wait_until_ready(client, lambda _machines: None)
            ready = time.monotonic()
            idle = [memory_of(name) for name in names]
            measured = time.monotonic() - ready
            corpus = texts / "corpus.txt"
            gather_corpus(corpus)
            job = client.submit(write_job(Path(folder), corpus, stages=len(names), steps=2).read_text())
            next(event for event in client.follow(job.id) if event.kind == "step")
            total = time.monotonic() - begin - measured
        finally:
            cluster.close()
            close_run_folder(membership)
    print_figure(
        "startup_first_step",
        ours=total,
        peer=GOAL_S,
        peer_name="goal",
        ratio=GOAL_S / total,
        unit="s",
        contributors=len(names),
        server_s=round(up - begin, 1),
        joined_and_measured_s=round(ready - up, 1),
    )
    largest = max(idle)
    print_figure(
        "idle_contributor",
        ours=largest / 2**20,
        peer=GOAL_BYTES / 2**20,
        peer_name="goal",
        ratio=GOAL_BYTES / largest,
        unit="MiB",
        contributors=len(names),
    )


if __name__ == "__main__":
    main()
