"""Best pipeline over machines in any order: dynamic programming over sets of machines.

A suffix consists of the last stages of a pipeline (`share_compute.planning.search.labels`). Each set contains the
machines of one suffix.

Without a ``width`` the search is exact, for up to `MOST_MACHINES` machines. With a ``width`` it is a beam search: for
each number of machines and first layer, only the best suffixes are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final

import numpy as np

from share_compute.planning.cost.options import Ints
from share_compute.planning.network.network import Floats
from share_compute.planning.search.labels import Labels, Suffixes, join, undominated

MOST_MACHINES: Final = 12
"""Maximum number of machines for which all possible stages are enumerated."""
MOST_IN_BEAM: Final = 48
"""Maximum number of machines in a beam search; a set of machines is a bit mask in a 64-bit integer."""
_SIZES_OF_RUNS: Final = (1, 2, 3, 4, 8)


def best_in_any_order(
    suffixes: Suffixes,
    machines: Sequence[int],
    *,
    sizes: Sequence[int],
    stages: int | None = None,
    width: int | None = None,
    budget: float,
    all_below: bool = False,
) -> tuple[list[int], bool]:
    """Find pipelines of any of these machines, in any order, with a step below ``suffixes.ceiling_s``.

    Lower the ceiling to the best step, unless ``all_below`` is true.

    Args:
        suffixes: the cost model, its tables and the ceiling.
        machines: usable machines, at most `MOST_IN_BEAM`.
        sizes: numbers of members that a stage may have.
        stages: exact number of stages; None allows any.
        width: number of suffixes kept for each number of machines, first layer and criterion (`Labels.best`); None sets
            no limit.
        budget: approximate number of examined candidates after which the search stops.
        all_below: whether to keep the ceiling, and so to find all undominated pipelines below it.

    Returns:
        Ids of labels of whole pipelines, fastest first, and whether the search was complete. After a complete search,
        no such pipeline is faster than the fastest of these, or than the ceiling if the list is empty.
    """
    sets = _Sets(suffixes, machines)
    options = list(sets.stages(sizes))
    complete = width is None and len(machines) <= MOST_MACHINES
    levels: list[list[Labels]] = [[suffixes.root(0)], *([] for _ in machines)]
    found: list[tuple[float, int]] = []
    until = suffixes.examined + budget
    for level in range(len(machines) + 1):
        if not levels[level]:
            continue
        labels = join(levels[level])
        levels[level] = []
        if level:
            labels = suffixes.keep(_settle(suffixes, labels, sets, stages, width))
            whole = labels.take(labels.start == 0)
            found += zip(whole.step_s.tolist(), whole.id.tolist(), strict=True)
            if not all_below:
                suffixes.ceiling_s = min(suffixes.ceiling_s, min(whole.step_s, default=np.inf))
            labels = labels.take(labels.start > 0)
        for bits, members in options:
            ready = np.flatnonzero(((labels.slot & bits) == 0) & sets.allowed(labels.slot | bits))
            if not len(ready):
                continue
            if suffixes.examined > until:
                return [label for _, label in sorted(found)], False
            behind = labels.take(ready)
            slots = behind.slot | bits
            levels[level + len(members)] += suffixes.before(
                behind, suffixes.number(members), slots, sets.spare_rate(slots)
            )
    return [label for _, label in sorted(found)], complete


class _Sets:
    """Sets of machines as bit masks."""

    def __init__(self, suffixes: Suffixes, machines: Sequence[int]) -> None:
        self._cost = suffixes.cost
        self._machines = tuple(machines)
        self._rates = np.array([suffixes.rates[machine] for machine in machines])
        self._memory = self._cost.memory_bytes[list(machines)]
        self._bits = np.arange(len(machines), dtype=np.int64)
        # Pairs of identical machines, each (machine, next identical machine), as indices into ``machines``.
        self._twins: list[tuple[int, int]] = []
        for first, machine in enumerate(machines):
            later = range(first + 1, len(machines))
            twin = next((other for other in later if self._alike(machine, machines[other])), None)
            if twin is not None:
                self._twins.append((first, twin))

    def spare_rate(self, slots: Ints) -> Floats:
        """Return the sum of the relative speeds of all machines outside of each set, shape ``[sets]``."""
        rate: Floats = self._outside(slots) @ self._rates
        return rate

    def spare_bytes(self, slots: Ints) -> Floats:
        """Return the bytes of memory of all machines outside of each set, shape ``[sets]``."""
        memory: Floats = self._outside(slots) @ self._memory
        return memory

    def _outside(self, slots: Ints) -> Ints:
        outside: Ints = 1 - ((slots[:, None] >> self._bits) & 1)
        return outside

    def allowed(self, slots: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return whether each set is canonical, shape ``[sets]``: it takes the first of several identical machines.

        Other sets lead to the same times and need no search.
        """
        taken = np.ones(len(slots), dtype=bool)
        for first, second in self._twins:
            taken &= ((slots >> first) & 1) >= ((slots >> second) & 1)
        return taken

    def stages(self, sizes: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield possible stages as (bit mask of the members, members), in the order of ``sizes``.

        For more than `MOST_MACHINES` machines, only sizes in `_SIZES_OF_RUNS` are used. The members of a stage are then
        neighbors in a list of the machines of one device kind and region, sorted by speed.
        """
        place = {machine: index for index, machine in enumerate(self._machines)}
        for size in sizes:
            for members in self._groups(size):
                if self._cost.may_share(members):
                    yield sum(1 << place[member] for member in members), members

    def _groups(self, size: int) -> Iterator[tuple[int, ...]]:
        if len(self._machines) <= MOST_MACHINES:
            yield from combinations(self._machines, size)
        elif size in _SIZES_OF_RUNS:
            classes: dict[tuple[str, int], list[int]] = {}
            for index in np.argsort(-self._rates, kind="stable"):
                machine = self._machines[int(index)]
                key = self._cost.kinds[machine], int(self._cost.network.region[machine])
                classes.setdefault(key, []).append(machine)
            for members in classes.values():
                for at in range(len(members) - size + 1):
                    yield tuple(members[at : at + size])

    def _alike(self, one: int, other: int) -> bool:
        cost = self._cost
        return bool(
            cost.may_share((one, other))
            and cost.memory_bytes[one] == cost.memory_bytes[other]
            and cost.update_s_per_parameter[one] == cost.update_s_per_parameter[other]
            and cost.call_s[one] == cost.call_s[other]
            and np.array_equal(cost.forward_s[one], cost.forward_s[other])
            and np.array_equal(cost.backward_s[one], cost.backward_s[other])
        )


def _settle(suffixes: Suffixes, labels: Labels, sets: _Sets, stages: int | None, width: int | None) -> Labels:
    """Drop labels that cannot beat the ceiling, are dominated, or cannot get the requested number of stages.

    Only a label of the same set of machines can dominate another. With a ``width``, apply `Labels.best`.
    """
    spare = sets.spare_rate(labels.slot), sets.spare_bytes(labels.slot)
    keep = suffixes.promise(labels, *spare) < suffixes.ceiling_s
    if stages is not None:
        keep &= (labels.stages == stages) | ((labels.stages < stages) & (labels.start > 0))
    labels = labels.take(keep)
    key = suffixes.signature(labels, stages=stages is not None, coarse=False)
    ranks = np.unique(labels.slot, return_inverse=True)[1].astype(np.int64)
    labels = labels.take(undominated(key * (len(labels) + 1) + ranks, labels.step_s, labels.trip_s))
    if width is not None:
        spare = sets.spare_rate(labels.slot), sets.spare_bytes(labels.slot)
        labels = labels.best(width, suffixes.promise(labels, *spare))
    return labels
