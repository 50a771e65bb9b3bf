"""Suffixes of a pipeline as labels, as in multi-criteria shortest-path search.

A suffix consists of the stages from one stage to the last. A search extends suffixes by one stage at the front.

A label dominates another label with the same key (`Suffixes.signature`) if neither its `Labels.step_s` nor its
`Labels.trip_s` is larger. The ceiling is the step time that plans must be below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, Self

import numpy as np

from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.cost.options import Ints, Option, Options
from share_compute.planning.network.network import Floats

BETTER: Final = 1 - 1e-12
"""Multiple of the best known step below which a step counts as faster; allows for rounding errors."""
_CHUNK: Final = 1 << 17
"""Approximate maximum number of elements of a temporary array; bounds the memory."""


@dataclass(slots=True, eq=False)
class Labels:
    """Suffixes of pipelines as columns ``[labels]``: each row is one suffix."""

    slot: Ints
    """Machines of the suffix.

    In `all_orders`, a bit mask of the machines that the suffix uses. In `fixed_order`, a position in the
    order: the suffix uses only machines from this position on.
    """
    start: Ints
    """First layer of the suffix."""
    option: Ints
    """Id of the first stage's members (`Suffixes.number`); -1 for the empty suffix."""
    window: Ints
    """Microbatches by which the first stage's forwards may run ahead of its backwards; at most microbatches - 1."""
    stages: Ints
    step_s: Floats
    """Step time in seconds, if the suffix were the whole pipeline."""
    trip_s: Floats
    """Seconds that one microbatch takes through the suffix and back: trip(p) of the cost formula."""
    parent: Ints
    """Id of the suffix without its first stage."""
    id: Ints

    def take(self, rows: Ints | slice | np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Self:
        """Return the labels in the given rows."""
        return type(self)(*(getattr(self, name)[rows] for name in _COLUMNS))

    def best(self, width: int, promised: Floats) -> Self:
        """Return the labels that a beam search keeps.

        For each first layer, these are the ``width`` labels with the lowest bounds, the ``width`` labels with the
        shortest steps, and the ``width`` labels with the shortest trips.

        Args:
            width: number of labels for each first layer and criterion.
            promised: lower bounds on the step of whole plans (`Suffixes.promise`) ``[labels]``.
        """
        kept = np.zeros(len(self), dtype=bool)
        for first, second in (
            (promised, self.trip_s),
            (self.step_s, self.trip_s),
            (self.trip_s, self.step_s),
        ):
            order = np.lexsort((second, first, self.start))
            begins = np.searchsorted(self.start[order], self.start[order])
            kept[order[np.arange(len(order)) - begins < width]] = True
        return self.take(kept)

    def __len__(self) -> int:
        return len(self.start)


_COLUMNS: Final = tuple(each.name for each in fields(Labels))


def join(parts: Sequence[Labels]) -> Labels:
    """Return the labels of all parts, in the order of the parts."""
    return Labels(*(np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS))


class Suffixes:
    """Extends suffixes of pipelines by one stage, and stores the suffixes passed to `keep`.

    Args:
        cost: the cost model.
        options: tables of the stages.
        ceiling_s: step time in seconds that plans must be below; a search may lower it as it finds plans.
    """

    def __init__(self, cost: TrainingCost, options: Options, ceiling_s: float) -> None:
        self.cost, self.options, self.ceiling_s = cost, options, ceiling_s
        self.layers, self.count = cost.num_layers, cost.workload.microbatches
        self.examined = 0
        """Number of candidates examined so far: a measure of the search effort, independent of the computer's speed."""
        self._used: list[Option] = []
        self._sizes, self._regions = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        self._numbers: dict[tuple[int, ...], int] = {}
        self._archive: list[Labels] = []
        self._next_id = 1
        usable = list(options.usable)
        cells = np.diff(cost.forward_s[usable] + cost.backward_s[usable], axis=1)
        least = cells.min(axis=0)
        self._prefix_s = np.concatenate([[0.0], np.cumsum(least)])
        """Lower bound on the seconds that one microbatch takes through the first l layers and back ``[layers + 1]``."""
        self._state_bytes = np.asarray(cost.state_bytes(cost.parameters, cost.trained))
        starts = np.arange(self.layers + 1)[:, None] - 1 - np.arange(self.layers)
        self._ahead_s = np.where(starts >= 0, self._prefix_s[np.maximum(starts, 0)], np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where((cells > 0) & (least > 0), least / cells, 0.0).max(axis=1)
        self.rates = dict(zip(usable, np.where(relative > 0, relative, 1.0), strict=True))
        """Relative speed of each usable machine: the largest ratio, over all layers, of its speed to that of
        the layer's fastest machine; 1.0 if there is no such ratio."""

    def root(self, slot: int) -> Labels:
        """Return a label of the empty suffix, with the given slot."""

        def whole(value: int) -> Ints:
            return np.array([value], dtype=np.int64)

        zero = np.zeros(1)
        return Labels(
            whole(slot), whole(self.layers), whole(-1), whole(0), whole(0), zero, zero, whole(-1), whole(0)
        )

    def number(self, members: tuple[int, ...]) -> int:
        """Return the id of these members for `Labels.option`."""
        members = tuple(sorted(members))
        if members not in self._numbers:
            self._numbers[members] = len(self._used)
            self._used.append(self.options.of(members, self._most_layers(members), self.ceiling_s))
            self._sizes = np.append(self._sizes, len(members))
            self._regions = np.append(self._regions, self._used[-1].region)
        return self._numbers[members]

    def _most_layers(self, members: tuple[int, ...]) -> int:
        """Return an upper bound, at least 1, on the number of layers that a stage can compute within the ceiling."""
        if not np.isfinite(self.ceiling_s):
            return self.layers
        work = self.ceiling_s * sum(self.rates[member] for member in members) / self.count * (1 + 1e-9)
        fewest = np.where(np.isfinite(self._ahead_s), self._prefix_s[:, None] - self._ahead_s, np.inf).min(
            axis=0
        )
        return max(1, int((fewest <= work).sum()))

    def signature(self, labels: Labels, *, stages: bool, coarse: bool) -> Ints:
        """Return the keys of suffixes, shape ``[labels]``: only suffixes with the same key may replace each other.

        Args:
            labels: suffixes; keys do not include their slots.
            stages: whether the key includes the number of stages, because an exact number is requested.
            coarse: whether the key leaves out the first stage's number of members and window, for a heuristic search.
        """
        key = np.where(labels.option >= 0, self._regions[labels.option], -1) + 1
        if not coarse:
            key = key * (self.count + 1) + np.where(labels.option >= 0, self._sizes[labels.option], 0)
            key = key * (self.count + 1) + labels.window
        if stages:
            key = key * (self.layers + 1) + labels.stages
        return key * (self.layers + 1) + labels.start

    def before(self, labels: Labels, number: int, slots: Ints, spare_rate: Floats) -> list[Labels]:
        """Extend labels by one stage at the front; return, in chunks, the results that may lead below the ceiling.

        A label is extended once for each possible first layer of the new stage.

        Args:
            labels: suffixes that do not use the new stage's machines.
            number: id of the new stage's members (`Suffixes.number`).
            slots: slot of each suffix after the extension, ``[labels]``.
            spare_rate: sum of the relative speeds of the machines that may precede the new stage, ``[labels]``.
        """
        grown = []
        reach = self._used[number].reach(self.ceiling_s)
        if not reach:
            return []
        rows = max(1, _CHUNK // reach)
        for at in range(0, len(labels), rows):
            piece = np.arange(at, min(at + rows, len(labels)))
            found = self._before(labels.take(piece), number, slots[piece], spare_rate[piece], reach)
            if found is not None:
                grown.append(found)
        return grown

    def _before(
        self, labels: Labels, number: int, slots: Ints, spare_rate: Floats, reach: int
    ) -> Labels | None:
        option, network = self._used[number], self.cost.network
        size, stop, behind = len(option.members), labels.start, labels.option
        last = behind < 0
        behind_size = np.where(last, 1, self._sizes[behind]) if len(self._sizes) else np.ones(len(stop))
        window = np.where(last, 0, np.minimum(labels.window + np.maximum(size, behind_size), self.count - 1))
        turns = (self.count - 1) // (window + size)
        hop, carry = np.zeros(len(stop)), np.zeros(len(stop))
        if not last.all():
            links = option.region, self._regions[behind]
            rate, data = network.bytes_per_s[links], self.cost.link_bytes[stop]
            with np.errstate(divide="ignore", invalid="ignore"):
                carried = np.where(rate > 0, data / rate, np.inf)
            following = -(-self.count // (size + behind_size - 1)) - 1
            hop = np.where(last, 0.0, network.latency_s[links] + carried)
            carry = np.where(last | (following <= 0), 0.0, np.where(following > 0, following, 1) * carried)
        enter = option.first_s[:, :reach][stop] + (2 * hop)[:, None]
        trip = enter + labels.trip_s[:, None]
        with np.errstate(invalid="ignore", divide="ignore"):
            waits = np.maximum(carry[:, None], turns[:, None] * trip)
            own = option.own_s[:, :reach][stop]
            step = np.maximum(np.maximum(enter + labels.step_s[:, None], own), trip + waits)
            # Lower bounds for the layers before the new stage: the time of one microbatch, and the work of all
            # microbatches.
            ahead = self._ahead_s[:, :reach][stop]
            work = self.count * ahead / spare_rate[:, None]
        limit = self.ceiling_s * BETTER
        useful = (step + ahead < limit) & (option.window[:, :reach][stop] >= window[:, None])
        useful &= np.isnan(work) | (work <= limit * (1 + 1e-9))
        row, more = np.nonzero(useful)
        self.examined += useful.size
        if not len(row):
            return None
        return Labels(
            slot=slots[row],
            start=stop[row] - 1 - more,
            option=np.full(len(row), number, dtype=np.int64),
            window=window[row].astype(np.int64),
            stages=labels.stages[row] + 1,
            step_s=step[row, more],
            trip_s=trip[row, more],
            parent=labels.id[row],
            id=np.zeros(len(row), dtype=np.int64),
        )

    def keep(self, labels: Labels) -> Labels:
        """Assign ids to labels, and store the labels for `layout`."""
        labels.id = np.arange(self._next_id, self._next_id + len(labels))
        self._next_id += len(labels)
        if len(labels):
            self._archive.append(labels)
        return labels

    def promise(self, labels: Labels, spare_rate: Floats, spare_bytes: Floats) -> Floats:
        """Return a lower bound on the step of all plans that end with each suffix, shape ``[labels]``.

        The bound is infinite if the machines that may precede the suffix lend too little memory.

        Args:
            labels: suffixes.
            spare_rate: sum of the relative speeds of the machines that may precede each suffix ``[labels]``.
            spare_bytes: sum of the memory of these machines in bytes ``[labels]``.
        """
        ahead = self._prefix_s[labels.start]
        with np.errstate(divide="ignore", invalid="ignore"):
            work = np.where(ahead > 0, self.count * ahead / spare_rate, 0.0)
        fits = self._state_bytes[labels.start] <= spare_bytes * (1 + 1e-9)
        promised: Floats = np.where(fits, np.maximum(labels.step_s + ahead, work), np.inf)
        return promised

    def layout(self, label_id: int) -> Layout:
        """Return the layout of a stored label that starts at layer 0."""
        offsets = [int(part.id[0]) for part in self._archive]
        stages = []
        while label_id > 0:
            part = self._archive[int(np.searchsorted(offsets, label_id, side="right")) - 1]
            row = label_id - int(part.id[0])
            members = self._used[int(part.option[row])].members
            stages.append((int(part.start[row]), members))
            label_id = int(part.parent[row])
        built = []
        for place, (start, members) in enumerate(stages):
            stop = stages[place + 1][0] if place + 1 < len(stages) else self.layers
            shares = self.cost.shares(members, start, stop)
            assert shares is not None  # otherwise the option's times are infinite, and no label uses it
            built.append(StageLayout(start, stop, members, shares))
        return Layout(tuple(built))


def undominated(key: Ints, step_s: Floats, trip_s: Floats) -> Ints:
    """Return the rows that no row of the same key dominates, ordered by key and step; of equal rows, return one."""
    if not len(key):
        return np.zeros(0, dtype=np.int64)
    rows = _unbeaten(key, step_s, trip_s)
    key, step_s, trip_s = key[rows], step_s[rows], trip_s[rows]
    order = np.lexsort((trip_s, step_s, key))
    key, trip = key[order], np.unique(trip_s[order], return_inverse=True)[1].astype(np.int64)
    group = np.cumsum(np.concatenate([[0], key[1:] != key[:-1]]))
    # Later groups have lower values, so that the running minimum restarts with each group.
    height = trip - group * (len(trip) + 1)
    lowest = np.minimum.accumulate(height)
    fresh = np.concatenate([[True], height[1:] < lowest[:-1]])
    kept: Ints = rows[order[fresh]]
    return kept


def _unbeaten(key: Ints, step_s: Floats, trip_s: Floats) -> Ints:
    """Return the rows that a quick filter keeps; it drops dominated rows without sorting.

    For each key, the filter compares all rows with the row whose sum of both times is smallest. Return all rows if a
    key is `_CHUNK` or larger, because the arrays have one element for each key.
    """
    keys = int(key.max()) + 1
    if keys > _CHUNK:
        return np.arange(len(key))
    both = step_s + trip_s
    least = np.full(keys, np.inf)
    np.minimum.at(least, key, both)
    first = np.flatnonzero(both == least[key])
    step, trip = np.full(keys, np.inf), np.full(keys, np.inf)
    step[key[first]], trip[key[first]] = step_s[first], trip_s[first]
    step, trip = step[key], trip[key]
    beaten = (step_s >= step) & (trip_s >= trip) & ((step_s > step) | (trip_s > trip))
    rows: Ints = np.flatnonzero(~beaten)
    return rows
