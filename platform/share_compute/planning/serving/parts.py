"""Splits the time of a request, or of a token, by machine and link."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.network.network import Floats
from share_compute.planning.plan import CauseKind
from share_compute.planning.serving.cost import TOKEN_ID_BYTES, ServingCost


@dataclass(frozen=True, slots=True)
class TimePart:
    """A part of the time that the objective minimises."""

    kind: CauseKind
    """Kind of the part; ``compute`` includes waiting for memory bandwidth, which callers may report as ``memory``."""
    machines: tuple[int, ...]
    """Indices of the machine, or of both ends of the link."""
    seconds: float


def trip_parts(cost: ServingCost, layout: Layout) -> list[TimePart]:
    """Return the parts of the time of a request alone, or, for throughput, of a token's round trip.

    Each machine has one part. Each link has two: its latency, and the transfer of bytes. The parts of the machines come
    first, in the order of the stages.
    """
    batch = cost.batches(len(layout.stages))[1]
    if cost.workload.objective == "latency":
        new, prompt = cost.workload.new_tokens, cost.workload.prompt_tokens
        times = cost.prompt_s + new * cost.token_s(1)
        size = cost.boundary_bytes(prompt) + new * cost.boundary_bytes(1)
        return list(_trip(cost, layout, times, size, (1 + new, new), new * TOKEN_ID_BYTES))
    times, size = cost.token_s(batch), cost.boundary_bytes(batch)
    return list(_trip(cost, layout, times, size, (1, 1), batch * TOKEN_ID_BYTES))


def _trip(
    cost: ServingCost,
    layout: Layout,
    times: Floats,
    size: Floats,
    messages: tuple[int, int],
    back_bytes: float,
) -> Iterator[TimePart]:
    for stage in layout.stages:
        yield TimePart("compute", stage.members, _through(times, stage))
    if len(layout.stages) == 1:
        return
    links = [
        (one.members + other.members, messages[0], size[other.start])
        for one, other in pairwise(layout.stages)
    ]
    ends = layout.stages[-1].members + layout.stages[0].members
    for machines, count, carried in (*links, (ends, messages[1], back_bytes)):
        latency_s, rate = cost.network.link(machines[0], machines[1])
        yield TimePart("latency", machines, count * latency_s)
        yield TimePart("link", machines, float(carried) / rate if rate > 0 else math.inf)


def step_parts(cost: ServingCost, layout: Layout) -> list[TimePart]:
    """Return the busy time of each machine and each link between two tokens, with all sequences in flight.

    The parts of the machines come first, in the order of the stages.
    """
    count, batch = cost.batches(len(layout.stages))
    each = batch / cost.workload.new_tokens
    times = cost.token_s(batch) + each * cost.prompt_s
    size = cost.boundary_bytes(batch + each * cost.workload.prompt_tokens)
    parts = [TimePart("compute", stage.members, count * _through(times, stage)) for stage in layout.stages]
    for one, other in pairwise(layout.stages):
        machines = one.members + other.members
        rate = cost.network.link(machines[0], machines[1])[1]
        carry_s = float(size[other.start]) / rate if rate > 0 else math.inf
        parts.append(TimePart("link", machines, count * carry_s))
    return parts


def _through(times: Floats, stage: StageLayout) -> float:
    machine = stage.members[0]
    return float(times[machine, stage.stop] - times[machine, stage.start])
