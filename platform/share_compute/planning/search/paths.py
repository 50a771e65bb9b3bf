"""Shortest pipelines through groups of machines, where each group is one stage that holds consecutive layers.

The search is the dynamic program of Held and Karp (A dynamic programming approach to sequencing problems, 1962) over
(set of groups, first group). Each state also holds the layers at which a pipeline may begin, so that the search
respects memory. For more than `MOST_EXACT` groups it is a beam search over the same states.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout
from share_compute.planning.cost.options import Options
from share_compute.planning.network.network import Floats
from share_compute.planning.search.choice import rounded
from share_compute.planning.search.labels import Suffixes, join, undominated

Members: TypeAlias = tuple[int, ...]
"""Indices of the machines of one stage."""
MOST_EXACT: Final = 8
"""Number of groups up to which the shortest path is exact."""
MOST_GROUPS: Final = 128
"""Maximum number of groups that a search should have; it takes seconds for more."""
_WIDTH: Final = 32
"""Beam width: number of paths that are kept for each criterion."""
_NEAREST: Final = 32
"""Number of groups by which a path of the beam search is extended: those nearest to its first group."""


@dataclass(frozen=True, slots=True)
class Path:
    """The last stages of a pipeline, or all of them."""

    length: tuple[float, ...]
    """Sums of the quantities between neighbors, compared one after the other."""
    groups: tuple[int, ...]
    """Indices of its groups, in pipeline order."""
    starts: int
    """Bit mask of the layers at which it may begin, so that its stages hold all layers from there on."""
    window: int
    """Microbatches by which the first stage's forwards may run ahead of its backwards."""

    @property
    def rounded_length(self) -> tuple[float, ...]:
        """The length without rounding errors."""
        return tuple(map(rounded, self.length))


@dataclass(slots=True)
class PathSearch:
    """Finds short pipelines.

    Attributes:
        cost: cost model of the job.
        groups: machines of each possible stage; the preferred ones first.
        lengths: quantities between two groups ``[quantities, groups, groups]``, symmetric and at least 0. The sums of
            the first quantity are compared first, and later quantities break ties. One of them is infinite between
            groups that cannot be neighbors.
        exact: whether all paths are compared.
    """

    cost: TrainingCost
    groups: Sequence[Members]
    lengths: Floats
    exact: bool = field(init=False)
    _nearest: NDArray[np.int64] = field(init=False)
    """Groups in the order of their length to each group ``[groups, groups]``, those that cannot be neighbors last."""
    _options: Options = field(init=False)
    _holds: dict[tuple[int, int], list[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.exact = len(self.groups) <= MOST_EXACT
        self.lengths = np.where(np.isinf(self.lengths).any(axis=0), np.inf, self.lengths)
        self._nearest = np.lexsort(self.lengths[::-1])
        self._options = Options(self.cost)

    def shortest(self, stages: int | None) -> list[Path]:
        """Return pipelines that hold the model, the shortest first; ties go to groups that come first.

        Args:
            stages: exact number of stages; None allows any.
        """
        nothing = (0.0,) * len(self.lengths)
        paths, found = [Path(nothing, (), 1 << self.cost.num_layers, 0)], list[Path]()
        for count in range(
            1, min(len(self.groups), self.cost.num_layers, stages or self.cost.num_layers) + 1
        ):
            grown: dict[tuple[frozenset[int], int], list[Path]] = {}
            for path in paths:
                for longer in self._extended(path):
                    if longer.starts & 1 and stages in {None, count}:
                        found.append(longer)
                    _keep(grown.setdefault((frozenset(longer.groups), longer.groups[0]), []), longer)
            # Stages in front never make a path shorter.
            best = min((path.length for path in found), default=None) if stages is None else None
            paths = [path for kept in grown.values() for path in kept if best is None or path.length < best]
            if not self.exact:
                paths = self._beam(paths)
        return sorted(found, key=lambda path: (path.rounded_length, len(path.groups), path.groups))

    def _extended(self, path: Path) -> Iterator[Path]:
        """Yield the path with one more stage in front that can hold at least one layer."""
        most, behind = self.cost.workload.microbatches - 1, path.groups[0] if path.groups else None
        for group in self._before(path):
            size = len(self.groups[group])
            window = 0 if behind is None else min(path.window + max(size, len(self.groups[behind])), most)
            holds, starts = self._holds_from(group, window), 0
            for stop in _bits(path.starts & ~1):
                starts |= holds[stop]
            length = path.length if behind is None else self._added(path, group, behind)
            if starts and all(map(math.isfinite, length)):
                yield Path(length, (group, *path.groups), starts, window)

    def _added(self, path: Path, one: int, other: int) -> tuple[float, ...]:
        """Return the total length of a path and of one more cut between two groups."""
        return tuple(map(add, path.length, self.lengths[:, one, other].tolist()))

    def _before(self, path: Path) -> list[int]:
        """Return the groups that may precede a path."""
        order: Iterable[int] = range(len(self.groups))
        if path.groups and not self.exact:
            order = self._nearest[path.groups[0]].tolist()
        free = [group for group in order if group not in path.groups]
        return free[:_NEAREST] if path.groups and not self.exact else free

    def _holds_from(self, group: int, window: int) -> list[int]:
        """Return, for each end of a range of layers, the bit mask of the starts of ranges that the group can hold."""
        found = self._holds.get((group, window))
        if found is None:
            layers = self.cost.num_layers
            fits = self._options.of(self.groups[group], layers).window >= window  # [stop, stop - 1 - start]
            stop, more = np.nonzero(fits)
            from_start = np.zeros((layers + 1, layers), dtype=bool)
            from_start[stop, stop - 1 - more] = True
            packed = np.packbits(from_start, axis=1, bitorder="little")
            found = [int.from_bytes(row.tobytes(), "little") for row in packed]
            self._holds[group, window] = found
        return found

    def _beam(self, paths: list[Path]) -> list[Path]:
        """Return the paths with the smallest distance to the next group, and the paths that leave the fewest layers."""
        nearest = [
            next(other for other in row if other != group)
            for group, row in enumerate(self._nearest[:, :2].tolist())
        ]

        def promised(path: Path) -> tuple[float, ...]:
            first = path.groups[0]
            return self._added(path, first, nearest[first])

        by_length = sorted(paths, key=lambda path: (promised(path), path.groups))
        by_layers = sorted(paths, key=lambda path: (path.starts & -path.starts, promised(path), path.groups))
        return list(dict.fromkeys([*by_length[:_WIDTH], *by_layers[:_WIDTH]]))

    def cut(self, path: Path) -> Layout | None:
        """Return the layout along a path with the shortest step by the cost formula; None if there is none."""
        suffixes = Suffixes(self.cost, self._options, math.inf)
        stages = [self.groups[group] for group in path.groups]
        labels = suffixes.root(0)
        for place in range(len(stages) - 1, -1, -1):
            ahead = sum(suffixes.rates[machine] for stage in stages[:place] for machine in stage)
            slots, spare = np.zeros(len(labels), dtype=np.int64), np.full(len(labels), ahead)
            grown = suffixes.before(labels, suffixes.number(stages[place]), slots, spare)
            if not grown:
                return None
            labels = join(grown)
            labels = labels.take(labels.start >= place if place else labels.start == 0)
            key = suffixes.signature(labels, stages=False, coarse=False)
            labels = suffixes.keep(labels.take(undominated(key, labels.step_s, labels.trip_s)))
        return suffixes.layout(int(labels.id[labels.step_s.argmin()])) if len(labels) else None


def _keep(kept: list[Path], path: Path) -> None:
    """Add a path to those with the same groups and first group, unless one of them is as good in all respects."""
    if any(
        other.length <= path.length and other.window <= path.window and path.starts & ~other.starts == 0
        for other in kept
    ):
        return
    kept[:] = [
        other
        for other in kept
        if not (
            path.length <= other.length and path.window <= other.window and other.starts & ~path.starts == 0
        )
    ]
    kept.append(path)


def _bits(mask: int) -> Iterator[int]:
    """Yield the positions of the bits that are set."""
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1
