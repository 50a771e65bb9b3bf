"""The search for the best serving layout: the shortest request, or the most tokens per second within latency limits.

Both objectives reduce to finding the row of machines with the smallest sum of costs
(`share_compute.planning.serving.rows`). For few machines, all orders of all subsets are searched. For many machines,
some orders are searched, then all orders of the most promising machines.

For throughput, this search runs inside a bisection over the time between tokens. Each step of the bisection
excludes the stages and links that would be busy for longer than that time.

Among layouts with equally short requests, the one whose busiest machine computes for the shortest time is preferred.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from share_compute.planning.cost.layout import Layout, StageLayout, solo
from share_compute.planning.network.network import Floats
from share_compute.planning.serving.cost import TOKEN_ID_BYTES, ServingCost
from share_compute.planning.serving.rows import Sums, best_row, best_row_in_order

__all__ = ["FoundServing", "ServingCost", "search_serving"]

_ALL_ORDERS = {"latency": 10, "throughput": 8}
"""Maximum number of machines for which all orders are searched, by objective."""
_TOLERANCE = 1e-9
_HALVINGS = 12
"""Maximum number of steps of one bisection."""


@dataclass(frozen=True, slots=True)
class FoundServing:
    """A layout that fits, with its predicted times."""

    layout: Layout
    first_token_s: float
    """TTFT of a request alone."""
    next_token_s: float
    """TPOT of a request alone (objective latency), or with all sequences in flight (objective throughput)."""
    tokens_per_s: float
    """Tokens per second with all sequences in flight."""
    within_limits: bool
    """Whether the layout keeps the limits on TTFT and TPOT; always true for objective latency."""
    exact: bool
    """Whether the search proved that no layout is better; never true for throughput with a limit on the first token."""


def search_serving(cost: ServingCost, *, finalists: int = 8, stages: int | None = None) -> list[FoundServing]:
    """Return the best layouts found, best first; layouts that exceed the latency limits come last.

    The list is empty if no layout was found that fits and needs no dead link.

    Args:
        cost: cost model of the deployment on its machines.
        finalists: maximum number of layouts.
        stages: exact number of stages, one machine each; None allows any.
    """
    objective = cost.workload.objective
    search = _fastest if objective == "latency" else _widest
    everyone = [machine for machine in range(cost.num_machines) if math.isfinite(cost.prompt_s[machine, -1])]
    if stages is not None and stages > min(len(everyone), cost.num_layers):
        return []
    small = len(everyone) <= _ALL_ORDERS[objective]
    layouts = {solo(machine, cost.num_layers, 1) for machine in everyone}
    if small:
        layouts |= set(search(cost, everyone, None, stages))
    else:
        for order in _orders(cost, everyone):
            layouts |= set(search(cost, everyone, order, stages))
        found = _ranked(cost, layouts, exact=False)
        layouts |= set(search(cost, _promising(cost, everyone, found), None, stages))
    if objective == "latency":
        layouts |= {_cut_evenly(cost, layout) for layout in layouts if len(layout.stages) > 1}
    if stages is not None:
        layouts = {layout for layout in layouts if len(layout.stages) == stages}
    exact = small and (objective == "latency" or cost.workload.first_token_limit_s is None)
    return _ranked(cost, layouts, exact=exact)[:finalists]


def _ranked(cost: ServingCost, layouts: Iterable[Layout], *, exact: bool) -> list[FoundServing]:
    found = []
    for layout in layouts:
        if not cost.fits(layout) or not math.isfinite(cost.request_s(layout)):
            continue
        loaded = cost.workload.objective == "throughput"
        first_s, next_s = cost.first_token_s(layout), cost.next_token_s(layout, loaded=loaded)
        limits = (cost.workload.first_token_limit_s, cost.workload.next_token_limit_s)
        within = not loaded or all(
            limit is None or time <= limit for time, limit in zip((first_s, next_s), limits, strict=True)
        )
        found.append(FoundServing(layout, first_s, next_s, cost.tokens_per_s(layout), within, exact=False))
    new = cost.workload.new_tokens

    def rank(one: FoundServing) -> tuple[bool, float, float, Layout]:
        request_s = one.first_token_s + new * one.next_token_s
        if cost.workload.objective == "throughput":
            return not one.within_limits, -one.tokens_per_s, request_s, one.layout
        # The sum is rounded, because sums of the same times in a different order differ slightly.
        return not one.within_limits, float(f"{request_s:.12g}"), _longest_s(cost, one.layout), one.layout

    found.sort(key=rank)
    if exact and found:
        found[0] = replace(found[0], exact=True)
    return found


def _orders(cost: ServingCost, machines: Sequence[int]) -> Iterator[list[int]]:
    """Yield orders of machines to search: the fastest first, the largest memory first, then region by region."""
    batch = cost.batches(min(len(machines), cost.num_layers))[1]
    strength = {
        "step": cost.token_s(batch)[:, -1],
        "memory": -cost.memory_bytes,
    }
    region = cost.network.region
    for values in strength.values():
        yield sorted(machines, key=lambda machine: (values[machine], machine))
    values = strength["step"]
    best_of = {
        int(place): min(values[one] for one in machines if region[one] == place) for place in region[machines]
    }
    yield sorted(machines, key=lambda one: (best_of[int(region[one])], region[one], values[one], one))


def _promising(cost: ServingCost, machines: Sequence[int], found: Sequence[FoundServing]) -> list[int]:
    """Return the machines to try in all orders: the machines of the best layouts, then the fastest ones."""
    limit = _ALL_ORDERS[cost.workload.objective]
    chosen = dict.fromkeys(machine for one in found for machine in one.layout.machines)
    speed = cost.token_s(1)[:, -1]
    chosen |= dict.fromkeys(sorted(machines, key=lambda machine: (speed[machine], machine)))
    return list(chosen)[:limit]


def _fastest(
    cost: ServingCost, machines: Sequence[int], order: Sequence[int] | None, stages: int | None = None
) -> list[Layout]:
    """Return the layout with the shortest request that was found, in a list; an empty list if none was found."""
    new, prompt = cost.workload.new_tokens, cost.workload.prompt_tokens
    latency, rate = cost.network.latency_s, cost.network.bytes_per_s
    size = cost.boundary_bytes(prompt) + new * cost.boundary_bytes(1)
    sums = Sums(
        stage=lambda machine: _stage(cost, cost.request_parts_s, machine),
        hop=(1 + new) * latency[:, :, None] + _carried(size, rate),
        back=new * (latency + _carried(np.array([TOKEN_ID_BYTES]), rate)[:, :, 0]),
        region=cost.network.region,
    )
    layout = _best(sums, machines, order, stages)
    return [] if layout is None else [layout]


def _longest_s(cost: ServingCost, layout: Layout) -> float:
    """Return the time that the busiest machine computes for one request."""
    times = cost.request_parts_s
    return max(
        float(times[stage.members[0], stage.stop] - times[stage.members[0], stage.start])
        for stage in layout.stages
    )


def _cut_evenly(cost: ServingCost, layout: Layout) -> Layout:
    """Return the layout of the same machines in the same order whose busiest machine computes for the shortest time."""
    num_layers = cost.num_layers
    longest_s = np.full(num_layers + 1, np.inf)
    """Compute time of the busiest machine so far, by the number of layers placed."""
    longest_s[0] = 0.0
    starts: list[NDArray[np.int64]] = []
    for machine in layout.machines:
        stage = np.where(
            np.tri(num_layers + 1, dtype=bool), np.inf, _stage(cost, cost.request_parts_s, machine)
        )
        longest_of = np.maximum(longest_s[:, None], stage)
        starts.append(longest_of.argmin(0))
        longest_s = longest_of.min(0)
    if not math.isfinite(longest_s[-1]):
        return layout
    stages: list[StageLayout] = []
    stop = num_layers
    for machine, start_of in zip(reversed(layout.machines), reversed(starts), strict=True):
        start = int(start_of[stop])
        stages.append(StageLayout(start, stop, (machine,), (1,)))
        stop = start
    return Layout(tuple(reversed(stages)))


def _widest(
    cost: ServingCost, machines: Sequence[int], order: Sequence[int] | None, stages_wanted: int | None = None
) -> Iterator[Layout]:
    """Yield layouts, each with a shorter time between tokens than the one before.

    With a limit on the first token, also yield the layout with the shortest request, last.
    """
    alone = machines if stages_wanted is None else ()
    best_s = min((_time_kept(cost, solo(machine, cost.num_layers, 1)) for machine in alone), default=math.inf)
    most = min(len(machines), cost.num_layers)
    counts: Iterable[int] = range(2, most + 1)
    if order is not None:
        # In a given order the search chooses the number of stages; here the number only determines the batch size.
        counts = [count for count in (2, 4, 8, 16) if count <= most]
    if stages_wanted is not None:
        counts = [stages_wanted] if 2 <= stages_wanted <= most else []
    for stages in counts:
        while True:
            reached_s = best_s
            beyond_s, aim_s = 0.0, best_s * (1 - _TOLERANCE)
            for _ in range(_HALVINGS):
                layout = _best(_kept(cost, stages, aim_s), machines, order, stages)
                time_s = math.inf if layout is None else _time_kept(cost, layout)
                if layout is not None and time_s < best_s:
                    yield layout
                    best_s = time_s
                elif best_s == reached_s:
                    break
                else:
                    beyond_s = aim_s
                aim_s = (beyond_s + best_s) / 2
            if best_s == reached_s or order is not None:
                break
    if cost.workload.first_token_limit_s is not None:
        yield from _fastest(cost, machines, order, stages_wanted)


def _time_kept(cost: ServingCost, layout: Layout) -> float:
    """Return the time between tokens under full load; infinite if memory or the first-token limit is exceeded."""
    limit = cost.workload.first_token_limit_s
    late = limit is not None and cost.first_token_s(layout) > limit
    return math.inf if late or not cost.fits(layout) else cost.next_token_s(layout, loaded=True)


def _kept(cost: ServingCost, stages: int, aim_s: float) -> Sums:
    """Return the costs of a token's round trip; infinite for stages and links busy for longer than ``aim_s``.

    With a limit on the first token, the time to the first token is added with weight ``aim_s`` / limit.
    """
    new, prompt = cost.workload.new_tokens, cost.workload.prompt_tokens
    limit = cost.workload.first_token_limit_s
    weight = aim_s / limit if limit and math.isfinite(aim_s) else 0.0
    count, batch = cost.batches(stages)
    times, prompts = cost.token_s(batch), cost.prompt_s

    def stage(machine: int) -> Floats:
        step = _differences(times[machine]) + batch * _differences(prompts[machine]) / new
        trip = _stage(cost, times + weight * prompts, machine)
        return np.where(count * step <= aim_s, trip, np.inf)

    latency, rate = cost.network.latency_s, cost.network.bytes_per_s
    carried = _carried(cost.boundary_bytes(batch * (1 + prompt / new)), rate)
    hop = latency[:, :, None] + _carried(cost.boundary_bytes(batch), rate)
    if weight:
        hop = hop + weight * (latency[:, :, None] + _carried(cost.boundary_bytes(prompt), rate))
    return Sums(
        stage=stage,
        hop=np.where(count * carried <= aim_s, hop, np.inf),
        back=latency + _carried(np.array([batch * TOKEN_ID_BYTES]), rate)[:, :, 0],
        region=cost.network.region,
    )


def _best(
    sums: Sums, machines: Sequence[int], order: Sequence[int] | None, stages: int | None
) -> Layout | None:
    row = best_row(sums, machines, stages) if order is None else best_row_in_order(sums, order)
    if row is None:
        return None
    return Layout(tuple(StageLayout(start, stop, (machine,), (1,)) for machine, start, stop in row))


def _stage(cost: ServingCost, times: Floats, machine: int) -> Floats:
    """Return a machine's time for layers [start, stop) ``[layers + 1, layers + 1]``; infinite if they do not fit."""
    return np.where(cost.needed_bytes <= cost.memory_bytes[machine], _differences(times[machine]), np.inf)


def _differences(sums: Floats) -> Floats:
    return sums[None, :] - sums[:, None]


def _carried(size_bytes: Floats, bytes_per_s: Floats) -> Floats:
    """Return size / bandwidth ``[regions, regions, sizes]``; infinite on dead links."""
    rate = bytes_per_s[:, :, None]
    return np.where(rate > 0, size_bytes / np.where(rate > 0, rate, 1.0), np.inf)
