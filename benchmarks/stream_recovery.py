"""Measure the pause of eight streams over two stages when one is killed at token 64, and whether the texts are equal.

Machines are raylets of this machine. SIGKILL ends a stage's process, the first and the last one in turn. Its machine
stays, so it is used again before the next round. The peer is a service without recovery: it starts the deployment anew
and generates the same tokens again.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from _attempts import Machines
from _harness import print_figure, start_cluster
from _serving import Served, Streams, make_model
from inference import CONFIG, VOCABULARY, WINDOW

from share_compute.inference.scheduler.events import Finished
from share_compute.topology import Topology

STREAMS, PROMPT, NEW, KILLED_AT = 8, 32, 128, 64
STAGES, MACHINES = 2, 3
MEDIAN_GOAL_MS = 2500.0


class Round(NamedTuple):
    """Results of one death."""

    gap_s: float
    """Longest pause of a stream, from its last token before the kill on."""
    usual_s: float
    """Median time between two tokens of a stream before the kill."""
    recomputed: int
    """Number of positions whose caches were lost or discarded, and that were computed again."""
    is_exact: bool
    errors: int


def prompts(chance: random.Random) -> list[list[int]]:
    """Return new random prompts."""
    return [[chance.randrange(VOCABULARY) for _ in range(PROMPT)] for _ in range(STREAMS)]


def disturbed(served: Served, wanted: list[list[int]], texts: list[list[int]], stage: int) -> Round:
    """Generate, and kill a stage when all streams have some tokens; return the results."""
    while (doomed := served.wait_for(STAGES).stages[stage].process_id) is None:
        time.sleep(0.1)  # it has not reported yet
    streams = served.submit(wanted, NEW)
    served.follow(streams, lambda: all(len(text) >= KILLED_AT for text in streams.texts))
    before = {sequence: len(tokens) for sequence, tokens in streams.tokens.items()}
    os.kill(doomed, signal.SIGKILL)
    served.follow(streams)
    gaps = [
        max(b - a for a, b in pairwise(times[before[one] - 1 :])) for one, times in streams.times_s.items()
    ]
    return Round(
        max(gaps),
        statistics.median(_intervals(streams, KILLED_AT)),
        sum(PROMPT + count for count in before.values()),
        streams.texts == texts,
        sum(not isinstance(end, Finished) for end in streams.ends.values()),
    )


def _intervals(streams: Streams, count: int) -> list[float]:
    return [b - a for times in streams.times_s.values() for a, b in pairwise(times[:count])]


def restarted(folder: Path, topology: Topology, wanted: list[list[int]]) -> float:
    """Return the seconds in which a new deployment generates the tokens up to the kill again."""
    served = Served(folder, topology, WINDOW, parallelism={"stages": STAGES}, max_concurrent=STREAMS)
    streams = served.follow(served.submit(wanted, KILLED_AT))
    served.close()
    return streams.seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smoke run: two deaths")
    parser.add_argument("--deaths", type=int, default=20)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    deaths = 2 if options.quick else options.deaths
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name, start_cluster() as cluster:
        folder = Path(name) / "model"
        make_model(folder, **CONFIG)
        topology = Machines(cluster).topology(MACHINES)
        served = Served(folder, topology, WINDOW, parallelism={"stages": STAGES}, max_concurrent=STREAMS)
        wanted = prompts(chance)
        served.wait_for(STAGES)
        texts = served.follow(served.submit(wanted, NEW)).texts
        rounds = [disturbed(served, wanted, texts, number % STAGES) for number in range(deaths)]
        recoveries = served.status().recoveries
        served.close()
        restart_s = statistics.median(
            restarted(folder, topology, wanted) for _ in range(1 if options.quick else 3)
        )
    gaps_ms = [1000 * (one.gap_s - one.usual_s) for one in rounds]
    exact = sum(one.is_exact for one in rounds)
    print_figure(
        "token_exact",
        ours=exact,
        peer=deaths,
        peer_name="goal: every round the tokens of the undisturbed run",
        ratio=exact / deaths,
        unit="rounds",
        client_errors=sum(one.errors for one in rounds),
        recoveries=recoveries,
    )
    print_figure(
        "gap_ms",
        ours=statistics.median(gaps_ms),
        peer=1000 * restart_s,
        peer_name="a new deployment that generates again what was there",
        ratio=1000 * restart_s / statistics.median(gaps_ms),
        unit="ms",
        worst=round(max(gaps_ms)),
        goal_median=MEDIAN_GOAL_MS,
        tokens_recomputed=round(statistics.median(one.recomputed for one in rounds)),
        usual_ms=round(1000 * statistics.median(one.usual_s for one in rounds), 1),
        gaps=[round(gap) for gap in gaps_ms],
        streams=STREAMS,
        deaths=deaths,
    )


if __name__ == "__main__":
    main()
