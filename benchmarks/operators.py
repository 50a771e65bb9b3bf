"""Measure the searches for strategies of operators on drawn graphs of 1,000 operators.

Step times are predictions of the cost model, on seeded graphs (tests/platform/planning/operators/drawn.py) and devices.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.platform.planning.operators.drawn import draw_graph, draw_group

from share_compute.planning.operators.plan import plan_layer
from share_compute.specification.placement.operators import SearchName

OPERATORS = 1000
LIMIT_S = 5.0
GOALS: dict[SearchName, float] = {"recursive_programming": 1.05, "sharding_propagation": 1.1}
"""Maximum step time of each search, in step times of the exact plan."""


def measure(count: int) -> Iterator[dict[str, Any]]:
    """Plan ``count`` drawn graphs with each search; yield its CPU seconds, and its gap to the exact plan."""
    seconds: dict[SearchName, list[float]] = {name: [] for name in ("dynamic_programming", *GOALS)}
    ratios: dict[SearchName, list[float]] = {name: [] for name in GOALS}
    for seed in range(count):
        draw = random.Random(seed)
        graph, group = draw_graph(draw, OPERATORS), draw_group(draw, draw.choice((2, 4, 8)))
        exact = 0.0
        for name, taken in seconds.items():
            begun = time.process_time()
            plan = plan_layer(graph, group, search=name)
            taken.append(time.process_time() - begun)
            exact = exact or plan.seconds
            if name in ratios:
                ratios[name].append(plan.seconds / exact)
    for name, taken in seconds.items():
        yield {
            "figure": "search_seconds",
            "search": name,
            "ours": round(max(taken), 3),
            "peer": LIMIT_S,
            "peer_name": "goal",
            "ratio": LIMIT_S / max(taken),
            "unit": "s (worst)",
            "median": round(statistics.median(taken), 3),
            "instances": count,
        }
    for name, found in ratios.items():
        yield {
            "figure": f"search_gap_{name}",
            "ours": round(max(found), 5),
            "peer": 1.0,
            "peer_name": "dynamic programming (exact)",
            "ratio": GOALS[name] / max(found),
            "unit": "predicted step time (worst)",
            "mean": round(statistics.mean(found), 5),
            "goal": GOALS[name],
            "instances": count,
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smoke run: few graphs")
    options = parser.parse_args()
    from _harness import print_figure

    for figure in measure(3 if options.quick else 40):
        print_figure(**figure)


if __name__ == "__main__":
    main()
