"""Measure the planner's gap to the best plan, its run time, and its advantage over simpler rules.

All step times are predictions of the planner's own cost model, on seeded instances: home machines and servers with
CPUs and GPUs, on a LAN, on WAN links between all, and in several LANs joined by WAN links.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from share_compute.models.profiles.profile import LayerProfile, ModelProfile, QuadraticGrowth
from share_compute.planning.cost.bound import lower_bound_s
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.cost.options import Options
from share_compute.planning.network.network import Network
from share_compute.planning.search.limits import LIMITS as LIMITS_OF_MORE
from share_compute.planning.search.limits import LIMITS_BEYOND, MANY
from share_compute.planning.search.orders import cut, region_chain
from share_compute.planning.search.search import Found, search
from share_compute.specification.workload import TrainingWorkload
from share_compute.topology import Contributor, Device, Topology

GIB = 2**30
MOST_RATIO = 1000.0
"""Maximum ratio that is printed, e.g. if a gap is zero."""
WHERE = ("lan", "wan", "mixed")


def instance(seed: int, where: str, *, machines: int, layers: int, microbatches: int) -> TrainingCost:
    """Return a seeded job on a seeded fleet: a decoder of transformer blocks on laptops, desktops and servers."""
    draw = random.Random(seed)
    hidden, vocabulary, tokens = draw.choice((512, 1024, 2048)), 32_000, draw.choice((128, 512))
    block, table = 12 * hidden * hidden, vocabulary * hidden
    layer = LayerProfile(
        parameters=block,
        forward_flops=QuadraticGrowth(linear=2 * block, quadratic=4 * hidden),
        backward_flops=QuadraticGrowth(linear=4 * block, quadratic=8 * hidden),
        activation_bytes=QuadraticGrowth(linear=68 * hidden),
        boundary_numbers=QuadraticGrowth(linear=hidden),
    )
    head = LayerProfile(
        parameters=table,
        forward_flops=QuadraticGrowth(linear=2 * table),
        backward_flops=QuadraticGrowth(linear=4 * table),
    )
    profile = ModelProfile(layers=(layer,) * layers, embedding=LayerProfile(parameters=table), head=head)
    state = profile.parameters * 16
    regions = {"lan": 1, "wan": machines, "mixed": max(2, machines // 4)}[where]
    return TrainingCost(
        profile,
        Topology(tuple(_machine(draw, index, state / min(machines, 12)) for index in range(machines))),
        _network(draw, [index % regions for index in range(machines)], regions),
        TrainingWorkload(microbatches * draw.choice((1, 4)), microbatches, tokens),
    )


def _machine(draw: random.Random, index: int, fair_bytes: float) -> Contributor:
    gpu = draw.random() < 0.4
    speed = draw.choice((4e12, 8e12, 2e13)) if gpu else draw.choice((5e10, 1e11, 4e11))
    device = Device(
        kind="cuda" if gpu else "cpu",
        name="gpu" if gpu else "cpu",
        memory_bytes=int(min(fair_bytes * draw.choice((0.8, 1.5, 4, 16)), 80 * GIB)),
        flops_per_s={"float32": speed * draw.uniform(0.8, 1.2)},
        memory_bytes_per_s=draw.uniform(2e11, 1e12) if gpu else draw.uniform(1e10, 5e10),
    )
    return Contributor(id=f"c{index}", name=f"machine {index}", devices=(device,))


def _network(draw: random.Random, region: Sequence[int], regions: int) -> Network:
    latency, rate = np.zeros((regions, regions)), np.zeros((regions, regions))
    for row in range(regions):
        latency[row, row], rate[row, row] = 3e-4, draw.choice((1.2e7, 1.2e8, 1.2e9))
        for column in range(row):
            latency[row, column] = latency[column, row] = draw.uniform(0.005, 0.1)
            rate[row, column] = rate[column, row] = draw.choice((1e6, 5e6, 2e7, 1e8))
    return Network(np.array(region), latency, rate)


def instances(count: int, first: int, *, most_machines: int) -> Iterator[tuple[str, TrainingCost]]:
    """Yield instances (kind of network, cost), with the kinds in turn; ``first`` is the seed of the first instance."""
    draw = random.Random(most_machines + first)
    for seed in range(first, first + count):
        where = WHERE[seed % len(WHERE)]
        yield (
            where,
            instance(
                seed,
                where,
                machines=draw.randint(3, most_machines),
                layers=draw.choice((12, 24, 32)),
                microbatches=draw.choice((4, 8, 16)),
            ),
        )


class Baselines:
    """Plans of simpler rules for an instance, each with the best order and number of machines for the rule."""

    def __init__(self, cost: TrainingCost) -> None:
        self._cost = cost
        times = cost.forward_s[:, -1] + cost.backward_s[:, -1]
        self._speed = {machine: 1 / float(times[machine]) for machine in Options(cost).usable}
        chain = {region: place for place, region in enumerate(region_chain(cost, self._speed))}
        near = sorted(
            self._speed, key=lambda one: (chain[int(cost.network.region[one])], -self._speed[one], one)
        )
        fast = sorted(self._speed, key=lambda one: (-self._speed[one], one))
        by_memory = sorted(self._speed, key=lambda one: (-cost.memory_bytes[one], one))
        self._orders = [near, fast, by_memory]

    def step_s(self) -> dict[str, float]:
        """Return the predicted step time of each rule's best plan; infinite if the rule finds no plan that fits."""
        return {
            "even split": self._best(self._in_a_row(lambda _one: 1.0)),
            "memory-weighted ring": self._best(
                self._in_a_row(lambda one: float(self._cost.memory_bytes[one]))
            ),
            "smallest memory-feasible cycle": self._smallest_cycle(),
            "stages by k^2/stages, water-filled": self._best(self._replicated_stages()),
        }

    def _best(self, layouts: Iterator[Layout]) -> float:
        return min((self._cost.step_s(each) for each in layouts if self._cost.fits(each)), default=math.inf)

    def _in_a_row(self, weight: Callable[[int], float]) -> Iterator[Layout]:
        for order in self._orders:
            for count in range(1, min(len(order), self._cost.num_layers) + 1):
                row = order[:count]
                yield self._cut(row, [weight(one) for one in row])

    def _cut(self, row: Sequence[int], weights: Sequence[float]) -> Layout:
        return cut(row, weights, self._cost.num_layers, self._cost.workload.microbatches)

    def _smallest_cycle(self) -> float:
        """Return the step time of the fastest plan on the fewest machines that can hold the model, layers by memory."""
        for count in range(1, min(len(self._speed), self._cost.num_layers) + 1):
            rows = {
                tuple(order[at : at + count])
                for order in self._orders
                for at in range(len(order) - count + 1)
            }
            found = self._best(
                self._cut(row, [float(self._cost.memory_bytes[one]) for one in row]) for row in sorted(rows)
            )
            if math.isfinite(found):
                return found
        return math.inf

    def _replicated_stages(self) -> Iterator[Layout]:
        """Yield layouts of s stages with k replicas each, with layers in proportion to speed within the memory limits.

        The rule would take the largest k * k / s that fits. Here every k and s is tried, and the fastest wins.
        """
        cost = self._cost
        for order in self._orders:
            for replicas in range(1, min(len(order), cost.workload.microbatches) + 1):
                groups = self._alike(order, replicas)
                for stages in range(1, min(len(groups), cost.num_layers) + 1):
                    chosen = groups[:stages]
                    layout = cut(
                        range(stages),
                        self._filled(chosen),
                        cost.num_layers,
                        cost.workload.microbatches,
                    )
                    built = []
                    for stage, members in zip(layout.stages, chosen, strict=True):
                        shares = cost.shares(members, stage.start, stage.stop)
                        if shares is None:
                            break
                        built.append(StageLayout(stage.start, stage.stop, members, shares))
                    else:
                        yield Layout(tuple(built))

    def _alike(self, order: Sequence[int], size: int) -> list[tuple[int, ...]]:
        groups: list[tuple[int, ...]] = []
        waiting: dict[tuple[str, int], list[int]] = {}
        for one in order:
            same = waiting.setdefault((self._cost.kinds[one], int(self._cost.network.region[one])), [])
            same.append(one)
            if len(same) == size:
                groups.append(tuple(sorted(same)))
                same.clear()
        return groups

    def _filled(self, groups: Sequence[tuple[int, ...]]) -> list[float]:
        """Return the layers of each stage by water-filling: in proportion to speed, up to the stage's memory."""
        cost = self._cost
        each = cost.bytes_needed(0, cost.num_layers, 1, 0) / cost.num_layers
        capacity = [float(cost.memory_bytes[list(group)].min()) / each for group in groups]
        speed = [sum(self._speed[one] for one in group) for group in groups]
        held, left = [0.0] * len(groups), float(cost.num_layers)
        while left > 1e-9:
            free = [place for place in range(len(groups)) if held[place] < capacity[place] - 1e-9]
            if not free:
                break
            total = sum(speed[place] for place in free)
            level = min(left / total, *((capacity[place] - held[place]) / speed[place] for place in free))
            for place in free:
                held[place] += level * speed[place]
            left -= level * total
        return [max(layers, 1e-6) for layers in held]


LIMITS = {
    "": ("orders and local moves, the search used beyond 12 machines", None),
    "_beyond_24": ("the limits of 25 to 64 machines", LIMITS_OF_MORE[MANY]._replace(exact_order=0)),
    "_beyond_64": ("the limits of more than 64 machines", LIMITS_BEYOND._replace(exact_order=0)),
}
"""Description and limits of each search that is used beyond a number of machines, by the suffix of a figure's name."""


def measure_gap(count: int, first: int) -> Iterator[dict[str, Any]]:
    """Compare, on few machines, the searches for many machines with the exact search, and that with the lower bound."""
    gaps: dict[str, list[float]] = {ending: [] for ending in LIMITS}
    bounds: list[float] = []
    for _, cost in instances(count, first, most_machines=10):
        exact = search(cost)
        if not exact:
            continue
        assert exact[0].exact, "the exact search gave up"
        for ending, (_, limits) in LIMITS.items():
            found = search(cost, method="orders", limits=limits)
            gaps[ending].append(found[0].step_s / exact[0].step_s - 1)
        bounds.append(exact[0].step_s / lower_bound_s(cost) - 1)
    for ending, (what, _) in LIMITS.items():
        yield from _gap_figures(ending, what, gaps[ending])
    yield {
        "figure": "gap_of_exact_to_bound",
        "ours": 100 * statistics.median(bounds),
        "peer": 0.0,
        "peer_name": "lower bound",
        "ratio": 1 / (1 + statistics.median(bounds)),
        "unit": "% (median)",
        "instances": len(bounds),
    }


def _gap_figures(ending: str, what: str, gaps: Sequence[float]) -> Iterator[dict[str, Any]]:
    for figure, value, goal in (
        ("mean_gap_to_exact", statistics.mean(gaps), 0.1),
        ("worst_gap_to_exact", max(gaps), 2.0),
    ):
        percent = 100 * value
        yield {
            "figure": figure + ending,
            "ours": percent,
            "peer": goal,
            "peer_name": "goal",
            "ratio": min(goal / max(percent, 1e-9), MOST_RATIO),
            "unit": "%",
            "instances": len(gaps),
            "of": f"{what}, against all orders, at most 10 machines",
            "optimal_percent": round(100 * statistics.mean(gap < 1e-9 for gap in gaps), 1),
        }


def measure_baselines(count: int, first: int) -> Iterator[dict[str, Any]]:
    """Compare the planner with simple rules; a ratio is the step time of the best rule divided by the planner's."""
    ratios: dict[str, list[float]] = {where: [] for where in WHERE}
    per_rule: dict[str, list[float]] = {}
    alone = 0
    for where, cost in instances(count, first, most_machines=24):
        found = search(cost)
        rules = Baselines(cost).step_s()
        best = min(rules.values())
        if not found:
            assert math.isinf(best), "a simple rule found a plan where the search found none"
            continue
        for rule, step_s in rules.items():
            if math.isfinite(step_s):
                per_rule.setdefault(rule, []).append(step_s / found[0].step_s)
        if math.isinf(best):
            alone += 1
            continue
        ratios[where].append(best / found[0].step_s)
        assert ratios[where][-1] >= 1 - 1e-9, f"slower than a simple rule on {where}: {rules}, {found[0]}"
    every = [ratio for part in ratios.values() for ratio in part]
    yield {
        "figure": "vs_baselines",
        "ours": 1.0,
        "peer": statistics.geometric_mean(every),
        "peer_name": "best of " + ", ".join(per_rule),
        "ratio": statistics.geometric_mean(every),
        "unit": "predicted step time",
        "worst_ratio": round(min(every), 6),
        "instances": len(every),
        "only_ours_found_a_plan": alone,
        **{where: round(statistics.geometric_mean(part), 3) for where, part in ratios.items()},
        "against_each": {rule: round(statistics.geometric_mean(part), 3) for rule, part in per_rule.items()},
    }


def _plan_large(where: str, seed: int, layers: int, machines: int, end: Connection) -> None:
    cost = instance(seed, where, machines=machines, layers=layers, microbatches=32)
    begun = time.process_time()
    found: list[Found] = search(cost)
    seconds = time.process_time() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    layout = found[0].layout
    end.send(
        (seconds, peak, len(layout.stages), len(layout.machines), found[0].step_s / lower_bound_s(cost) - 1)
    )


def measure_large(machines: int, seed: int) -> Iterator[dict[str, Any]]:
    """Plan 128 layers on ``machines`` machines, each time in a process of its own; measure CPU seconds and memory."""
    context = multiprocessing.get_context("spawn")
    done: dict[str, tuple[float, ...]] = {}
    for where in WHERE:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_plan_large, args=(where, seed, 128, machines, there))
        process.start()
        there.close()  # so that only the child holds its end, and the end of the child is noticed
        try:
            done[where] = here.recv()
        except EOFError:
            process.join()
            raise RuntimeError(
                f"the process that plans on {machines} machines ({where}) ended with exit code {process.exitcode}"
            ) from None
        process.join()
    seconds, peaks, stages, used, gaps = zip(*done.values(), strict=True)
    yield {
        "figure": f"seconds_128x{machines}",
        "ours": max(seconds),
        "peer": 10.0,
        "peer_name": "goal",
        "ratio": 10 / max(seconds),
        "unit": "CPU s (slowest)",
        "machines": machines,
        "each": {
            where: {
                "seconds": round(seconds[place], 2),
                "stages": stages[place],
                "machines_used": used[place],
                "gap_to_bound": round(gaps[place], 3),
            }
            for place, where in enumerate(WHERE)
        },
    }
    yield {
        "figure": f"peak_memory_128x{machines}",
        "ours": max(peaks) / GIB,
        "peer": 1.0,
        "peer_name": "goal",
        "ratio": GIB / max(peaks),
        "unit": "GiB (largest)",
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smoke run: few instances, a smaller fleet")
    parser.add_argument("--seed", type=int, default=1_000_000, help="of the first instance")
    options = parser.parse_args()
    quick, seed = options.quick, options.seed
    from _harness import print_figure  # it loads torch, which the measured process does without

    for measured in (
        measure_gap(12 if quick else 200, seed),
        measure_baselines(12 if quick else 120, seed),
        measure_large(200 if quick else 1000, seed),
    ):
        for line in measured:
            print_figure(**line)


if __name__ == "__main__":
    main()
