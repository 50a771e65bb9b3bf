"""Lower bound on the time of any serving layout, by the formula of `share_compute.planning.serving.cost`.

A layout on one machine is evaluated exactly. For several machines and a given number of stages, the bound is the
largest of the bounds below. The result is the minimum over all numbers of stages.

- Each layer takes at least its time on the machine that is fastest for it. Between neighbouring stages, and back to the
  first stage, a token takes at least the time of the best link.
- With all sequences in flight, the fastest machines, one for each stage, must do the work of all layers, and the best
  link must carry all sequences.
- Machines are counted from the largest memory down until together they hold the model with all KV caches. A layout has
  at least this many stages.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from share_compute.planning.cost.layout import Layout, solo
from share_compute.planning.cost.options import Ints
from share_compute.planning.network.network import Floats
from share_compute.planning.serving.cost import TOKEN_ID_BYTES, ServingCost


def objective_s(cost: ServingCost, layout: Layout) -> float:
    """Return the time in seconds that the objective minimises.

    That is the time of a request alone (latency), or the time between tokens with all sequences in flight (throughput).
    """
    if cost.workload.objective == "latency":
        return cost.request_s(layout)
    return cost.next_token_s(layout, loaded=True)


def serving_bound_s(cost: ServingCost) -> float:
    """Return a lower bound in seconds on `objective_s` of any layout that fits."""
    smallest = min(float(cost.needed_bytes[layer, layer + 1]) for layer in range(cost.num_layers))
    able = np.isfinite(cost.prompt_s[:, -1]) & (cost.memory_bytes >= smallest)
    usable = np.flatnonzero(able)
    alone = (solo(int(machine), cost.num_layers, 1) for machine in usable)
    bound_s = min((objective_s(cost, layout) for layout in alone if cost.fits(layout)), default=math.inf)
    largest = np.cumsum(np.sort(cost.memory_bytes[usable])[::-1])
    fewest = max(2, int((largest < cost.needed_bytes[0, -1]).sum()) + 1)
    most = min(len(usable), cost.num_layers)
    if fewest > most:
        return bound_s
    relaxation = _Relaxation(cost, usable)
    if cost.workload.objective == "latency":
        return min(bound_s, relaxation.request_s(fewest))  # more stages only add links
    return min(bound_s, *(relaxation.next_token_s(stages) for stages in range(fewest, most + 1)))


class _Relaxation:
    def __init__(self, cost: ServingCost, usable: Ints) -> None:
        self._cost, self._usable = cost, usable
        self._prompt_s = np.diff(cost.prompt_s[usable], axis=1)
        self._latency_s, self._bytes_per_s = _links(cost, usable)
        self._work = lru_cache(maxsize=None)(self._work_of)

    def request_s(self, stages: int) -> float:
        """Return a lower bound on the time of one request alone on ``stages`` stages."""
        cost, new = self._cost, self._cost.workload.new_tokens
        each = self._prompt_s + new * np.diff(cost.token_s(1)[self._usable], axis=1)
        size = (cost.boundary_bytes(cost.workload.prompt_tokens) + new * cost.boundary_bytes(1))[1:-1].min()
        hop_s = self._link_s(1 + new, size)
        return float(each.min(axis=0).sum()) + (stages - 1) * hop_s + self._link_s(new, new * TOKEN_ID_BYTES)

    def next_token_s(self, stages: int) -> float:
        """Return a lower bound on the time between tokens, with all sequences in flight on ``stages`` stages."""
        cost, workload = self._cost, self._cost.workload
        count, batch = cost.batches(stages)
        pass_s, work_s, speeds = self._work(batch)
        hop_s = self._link_s(1, cost.boundary_bytes(batch)[1:-1].min())
        round_s = pass_s + (stages - 1) * hop_s + self._link_s(1, batch * TOKEN_ID_BYTES)
        each = batch * (1 + workload.prompt_tokens / workload.new_tokens)
        carry_s = self._link_s(0, cost.boundary_bytes(each)[1:-1].min())
        return max(round_s, count * work_s / float(speeds[stages - 1]), count * carry_s)

    def _work_of(self, batch: int) -> tuple[float, float, Floats]:
        """Return (token time, engine step time, cumulative speeds), with each layer on its fastest machine.

        A machine's speed is relative: the largest ratio, over all layers, of its speed to that of the layer's fastest
        machine. The cumulative speeds begin with the fastest machine.
        """
        token_s = np.diff(self._cost.token_s(batch)[self._usable], axis=1)
        step_s = token_s + batch * self._prompt_s / self._cost.workload.new_tokens
        least_s = step_s.min(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(step_s > 0, least_s / step_s, 0.0).max(axis=1)
        speeds = np.cumsum(np.sort(np.where(share > 0, share, 1.0))[::-1])
        return float(token_s.min(axis=0).sum()), float(least_s.sum()), speeds

    def _link_s(self, messages: int, size_bytes: float) -> float:
        """Return the time of messages with ``size_bytes`` in total over the best link; infinite if there is no link."""
        with np.errstate(divide="ignore", invalid="ignore"):
            times = messages * self._latency_s + size_bytes / self._bytes_per_s
        return float(np.where(self._bytes_per_s > 0, times, np.inf).min(initial=np.inf))


def _links(cost: ServingCost, usable: Ints) -> tuple[Floats, Floats]:
    """Return latency and bandwidth of the links between usable machines, one for each pair of regions."""
    regions, counts = np.unique(cost.network.region[usable], return_counts=True)
    joined = ~np.eye(len(regions), dtype=bool) | (counts > 1)[:, None]
    pairs = np.ix_(regions, regions)
    return cost.network.latency_s[pairs][joined], cost.network.bytes_per_s[pairs][joined]
