"""Best pipeline over machines in a given order: pools are machines that stand side by side, others are skipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

import numpy as np

from share_compute.planning.labels import Labels, Suffixes, join, undominated


def best_in_order(
    suffixes: Suffixes,
    order: Sequence[int],
    *,
    sizes: Sequence[int],
    pools: int | None = None,
    width: int | None = None,
) -> list[int]:
    """Find pipelines of machines in this order that are faster than the ceiling, and lower it to the best of them.

    Exact without ``width``: no layout of this order, with pools of these sizes, is faster than the best found.

    Args:
        suffixes: the objective, its tables and its ceiling.
        order: usable machines.
        sizes: numbers of members that a pool may have.
        pools: exactly that many pools.
        width: keep at most that many suffixes for each first layer, and let one replace another that differs in what
            the schedule keeps in flight.

    Returns:
        Ids of labels of whole pipelines, fastest first; empty when none is below the ceiling.
    """
    # Speed and memory of all machines before each place.
    rates = np.cumsum([0.0, *(suffixes.rates[machine] for machine in order)])
    memory = np.cumsum([0.0, *suffixes.cost.memory_bytes[list(order)]])

    def settle(labels: Labels) -> Labels:
        """Drop what something else replaces, and of each first layer all but the ``width`` best."""
        promised = suffixes.promise(labels, rates[labels.slot], memory[labels.slot])
        labels = labels.take((promised < suffixes.ceiling_s) | (labels.start == 0) | (labels.option < 0))
        key = suffixes.signature(labels, pools=pools is not None, coarse=width is not None)
        labels = labels.take(undominated(key, labels.step_s, labels.trip_s))
        if width is not None:
            labels = labels.best(width, suffixes.promise(labels, rates[labels.slot], memory[labels.slot]))
        return labels

    settled = suffixes.root(len(order))
    recent: list[tuple[int, Labels]] = []
    found: list[tuple[float, int]] = []
    widest = max(sizes)
    for place in range(len(order) - 1, -1, -1):
        # What the widest pool may continue, all others may too.
        while recent and recent[0][0] >= place + widest:
            settled = settle(join([settled, recent.pop(0)[1]]))
        # By falling position, so that those behind a pool of any size stand at the front.
        behind = join([settled, *(part for _, part in recent)])
        ends = np.cumsum([len(settled), *(len(part) for _, part in recent)])
        grown = []
        for members in _runs(suffixes, order, place, sizes):
            free = int(ends[sum(at >= place + len(members) for at, _ in recent)])
            slots, rate = np.full(free, place, dtype=np.int64), np.full(free, rates[place])
            grown += suffixes.before(behind.take(slice(free)), suffixes.number(members), slots, rate)
        if not grown:
            continue
        fresh = join(grown)
        if pools is not None:
            fresh = fresh.take((fresh.pools == pools) | ((fresh.pools < pools) & (fresh.start > 0)))
            if not len(fresh):
                continue
        fresh = suffixes.keep(settle(fresh))
        whole = fresh.take(fresh.start == 0)
        found += zip(whole.step_s.tolist(), whole.id.tolist(), strict=True)
        suffixes.ceiling_s = min(suffixes.ceiling_s, min(whole.step_s, default=np.inf))
        recent.append((place, fresh.take(fresh.start > 0)))
    return [label for _, label in sorted(found)]


def _runs(
    suffixes: Suffixes, order: Sequence[int], place: int, sizes: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Yield the pools that begin at one place of the order."""
    first = order[place]
    alike = len(
        list(
            takewhile(lambda other: suffixes.cost.may_pool((first, other)), order[place : place + max(sizes)])
        )
    )
    for size in sizes:
        if size <= alike:
            yield tuple(order[place : place + size])
