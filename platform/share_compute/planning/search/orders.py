"""Orders of machines to search, and simple layouts that give the search an upper bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout, StageLayout, solo
from share_compute.planning.network.network import transfer_s

MOST_CANDIDATES: Final = 192
"""Maximum number of machines that a search considers; `shortlist` selects them."""
_MOST_ALONE: Final = 8
_MOST_LARGE: Final = 32


def region_chain(cost: TrainingCost, rates: Mapping[int, float]) -> list[int]:
    """Return the regions of the machines in a greedy order.

    The first region has the shortest estimated step on its machines alone. Each further region is, among the remaining
    regions, the one with the shortest transfer from its predecessor.
    """
    usable = list(rates)
    pass_s = float(np.diff(cost.forward_s[usable] + cost.backward_s[usable], axis=1).min(axis=0).sum())
    inside: dict[int, list[float]] = {}
    for machine, rate in rates.items():
        inside.setdefault(int(cost.network.region[machine]), []).append(rate)
    size = float(cost.link_bytes.max())

    def hop_s(one: int, other: int) -> float:
        return transfer_s(
            float(cost.network.latency_s[one, other]), float(cost.network.bytes_per_s[one, other]), size
        )

    def alone_s(region: int) -> float:
        """Return an estimate of the step time on the fastest machines of one region."""
        fastest = np.sort(inside[region])[::-1][: cost.num_layers]
        stages = np.arange(1, len(fastest) + 1)
        flow = (cost.workload.microbatches + stages - 1) * pass_s / np.cumsum(fastest)
        with np.errstate(invalid="ignore"):
            crossing = np.where(stages > 1, 2 * (stages - 1) * hop_s(region, region), 0.0)
        return float((flow + crossing).min())

    chain = [min(inside, key=lambda region: (alone_s(region), region))]
    left = set(inside) - set(chain)
    while left:
        best = min(left, key=lambda region: (hop_s(chain[-1], region), -sum(inside[region]), region))
        chain.append(best)
        left.remove(best)
    return chain


def shortlist(cost: TrainingCost, rates: Mapping[int, float]) -> list[int]:
    """Return the machines that a search considers, in ascending order: all machines if there are few.

    If there are more than `MOST_CANDIDATES`, these are machines that can hold the model alone, the machines with the
    most memory, machines of the first regions in the `region_chain`, and the fastest machines.
    """
    if len(rates) <= MOST_CANDIDATES:
        return sorted(rates)
    by_rate = sorted(rates, key=lambda machine: (-rates[machine], -cost.memory_bytes[machine], machine))
    whole = cost.bytes_needed(0, cost.num_layers, 1, 0)
    alone = [machine for machine in by_rate if cost.memory_bytes[machine] >= whole]
    large = sorted(by_rate, key=lambda machine: -cost.memory_bytes[machine])
    place = {region: index for index, region in enumerate(region_chain(cost, rates))}
    near = sorted(by_rate, key=lambda machine: place[int(cost.network.region[machine])])
    chosen = dict.fromkeys(
        (*alone[:_MOST_ALONE], *large[:_MOST_LARGE], *near[: MOST_CANDIDATES // 2], *by_rate)
    )
    return sorted(list(chosen)[:MOST_CANDIDATES])


def orders(cost: TrainingCost, rates: Mapping[int, float]) -> list[tuple[int, ...]]:
    """Return the orders of machines to search.

    Some are sorted by region, kind of device, and speed or memory. Others are sorted by speed, memory or index alone.
    """
    chain = region_chain(cost, rates)
    place = {region: index for index, region in enumerate(chain)}
    memory, kinds = cost.memory_bytes, cost.kinds

    def by(key: Callable[[int], tuple[float | str, ...]], *, turned: bool = False) -> tuple[int, ...]:
        sign = -1 if turned else 1
        return tuple(
            sorted(
                rates,
                key=lambda one: (sign * place[int(cost.network.region[one])], kinds[one], *key(one), one),
            )
        )

    found = [
        by(lambda one: (-rates[one],)),
        by(lambda one: (rates[one],)),
        by(lambda one: (-memory[one],)),
        by(lambda one: (-rates[one],), turned=True),
        tuple(sorted(rates, key=lambda one: (-rates[one], one))),
        tuple(sorted(rates, key=lambda one: (-memory[one], one))),
        tuple(sorted(rates)),
    ]
    return list(dict.fromkeys(found))


def simple_layouts(cost: TrainingCost, order: Sequence[int], rates: Mapping[int, float]) -> Iterator[Layout]:
    """Yield layouts that need no search: single machines, and layers split evenly, by speed or by memory."""
    layers, microbatches = cost.num_layers, cost.workload.microbatches
    for machine in order:
        yield solo(machine, layers, microbatches)
    by_rate = sorted(order, key=lambda machine: (-rates[machine], machine))
    for count in _counts(min(len(order), layers)):
        fastest = set(by_rate[:count])
        row = [machine for machine in order if machine in fastest]
        for weights in ([1.0] * count, [rates[one] for one in row], [cost.memory_bytes[one] for one in row]):
            yield cut(row, weights, layers, microbatches)


def cut(row: Sequence[int], weights: Sequence[float], layers: int, microbatches: int) -> Layout:
    """Return a layout with one machine per stage, and layers in proportion to weights, at least one per stage."""
    edges = np.rint(np.cumsum(weights) / np.sum(weights) * layers).astype(int).tolist()
    edges[-1] = layers
    for index in range(len(edges)):
        edges[index] = max(edges[index], index + 1)
    for index in range(len(edges) - 2, -1, -1):
        edges[index] = min(edges[index], edges[index + 1] - 1)
    starts = [0, *edges[:-1]]
    return Layout(
        tuple(
            StageLayout(start, stop, (machine,), (microbatches,))
            for machine, start, stop in zip(row, starts, edges, strict=True)
        )
    )


def _counts(most: int) -> list[int]:
    """Return numbers of machines to try, up to ``most``: 2 to 12, then each about 25% above the previous number."""
    counts = list(range(2, min(most, 12) + 1))
    while counts and counts[-1] < most:
        counts.append(min(most, counts[-1] * 5 // 4))
    return counts
