"""Best pipeline over machines in a given order: a stage has consecutive machines, and machines may be skipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

import numpy as np

from share_compute.planning.search.labels import Labels, Suffixes, join, undominated


def best_in_order(
    suffixes: Suffixes,
    order: Sequence[int],
    *,
    sizes: Sequence[int],
    stages: int | None = None,
    width: int | None = None,
) -> list[int]:
    """Find pipelines of machines in this order with a step below ``suffixes.ceiling_s``.

    Lower the ceiling to the best step.

    Args:
        suffixes: the cost model, its tables and the ceiling.
        order: usable machines.
        sizes: numbers of members that a stage may have.
        stages: exact number of stages; None allows any.
        width: number of suffixes kept for each first layer and criterion (`Labels.best`); None makes the search exact.

    Returns:
        Ids of labels of whole pipelines, fastest first; an empty list if none is below the ceiling.
    """
    # Prefix sums: element i is the total speed, or the total memory, of the first i machines in the order.
    rates = np.cumsum([0.0, *(suffixes.rates[machine] for machine in order)])
    memory = np.cumsum([0.0, *suffixes.cost.memory_bytes[list(order)]])

    def settle(labels: Labels) -> Labels:
        """Drop labels that are dominated or cannot beat the ceiling; with ``width``, apply `Labels.best`."""
        promised = suffixes.promise(labels, rates[labels.slot], memory[labels.slot])
        labels = labels.take((promised < suffixes.ceiling_s) | (labels.start == 0) | (labels.option < 0))
        key = suffixes.signature(labels, stages=stages is not None, coarse=width is not None)
        labels = labels.take(undominated(key, labels.step_s, labels.trip_s))
        if width is not None:
            labels = labels.best(width, suffixes.promise(labels, rates[labels.slot], memory[labels.slot]))
        return labels

    settled = suffixes.root(len(order))
    recent: list[tuple[int, Labels]] = []
    found: list[tuple[float, int]] = []
    widest = max(sizes)
    for place in range(len(order) - 1, -1, -1):
        # Every stage that begins at ``place`` may precede labels that start at least ``widest`` machines later. So
        # these labels are comparable.
        while recent and recent[0][0] >= place + widest:
            settled = settle(join([settled, recent.pop(0)[1]]))
        # Parts come in descending order of position: the parts that may follow a stage of a given size form a prefix.
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
        if stages is not None:
            fresh = fresh.take((fresh.stages == stages) | ((fresh.stages < stages) & (fresh.start > 0)))
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
    """Yield the members of each possible stage that begins at ``place`` in the order."""
    first = order[place]
    alike = len(
        list(
            takewhile(
                lambda other: suffixes.cost.may_share((first, other)), order[place : place + max(sizes)]
            )
        )
    )
    for size in sizes:
        if size <= alike:
            yield tuple(order[place : place + size])
