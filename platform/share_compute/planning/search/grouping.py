"""Groups neighboring layers of very deep models, so that a search has fewer cuts to try."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Final

from share_compute.models.profiles.profile import LayerProfile, joined
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.cost.timings import LayerTiming

MOST_LAYERS: Final = 192
"""Number of layers above which `search` works on groups of layers, except with the method ``recursive``.

The tables of a search grow with the square of the number of layers.
"""
_MOST_MOVED: Final = 32
"""Maximum number of stages for which `Grouped.refined` moves cuts."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """A cost model of layers, and a coarse cost model of groups of these layers."""

    cost: TrainingCost
    """Cost model of all layers."""
    edges: tuple[int, ...]
    """First layer of each group, followed by the number of layers."""
    coarse: TrainingCost
    """Cost model of the groups."""

    def refined(self, layout: Layout) -> Layout | None:
        """Convert a layout of groups to a layout of layers, and move its cuts to shorten the step.

        Return None if no layout that was tried fits.
        """
        stops = [self.edges[stage.stop] for stage in layout.stages]
        best = self._cut(layout, stops)
        stride = max(stop - start for start, stop in pairwise(self.edges)) // 2
        while stride and len(stops) <= _MOST_MOVED:
            for place in range(len(stops) - 1):
                for moved in (stops[place] - stride, stops[place] + stride):
                    tried = self._cut(layout, [*stops[:place], moved, *stops[place + 1 :]])
                    if tried[0] < best[0]:
                        best, stops[place] = tried, moved
            stride //= 2
        return best[1]

    def _cut(self, layout: Layout, stops: Sequence[int]) -> tuple[float, Layout | None]:
        """Return (step in seconds, layout) with the given cuts; (infinity, None) if the layout is impossible."""
        stages = []
        for stage, (start, stop) in zip(layout.stages, pairwise((0, *stops)), strict=True):
            shares = self.cost.shares(stage.members, start, stop) if start < stop else None
            if shares is None:
                return math.inf, None
            stages.append(StageLayout(start, stop, stage.members, shares))
        moved = Layout(tuple(stages))
        return (self.cost.step_s(moved), moved) if self.cost.fits(moved) else (math.inf, None)


def group(cost: TrainingCost, least: int) -> Grouped:
    """Group neighboring layers into at least ``least`` groups, or leave them single if there are fewer layers."""
    layers = cost.profile.layers
    edges = _edges(layers, least)
    profile = cost.profile.model_copy(
        update={"layers": tuple(joined(layers[start:stop]) for start, stop in pairwise(edges))}
    )
    timings = {
        machine: {
            place: LayerTiming(
                sum(timed[layer].forward_s for layer in range(start, stop)),
                sum(timed[layer].backward_s for layer in range(start, stop)),
            )
            for place, (start, stop) in enumerate(pairwise(edges))
            if all(layer in timed for layer in range(start, stop))
        }
        for machine, timed in cost.timings.items()
    }
    return Grouped(cost, edges, replace(cost, profile=profile, timings=timings))


def _edges(layers: Sequence[LayerProfile], least: int) -> tuple[int, ...]:
    """Return the first layer of each group, followed by the number of layers; prefer groups of equal layers."""
    size = min(-(-len(layers) // MOST_LAYERS), max(1, len(layers) // max(1, least)))
    runs = [len(list(run)) for _, run in groupby(layers)]
    for larger in (size, 2 * size):
        if least <= sum(-(-run // larger) for run in runs) <= MOST_LAYERS:
            return (*_starts(runs, larger), len(layers))
    return (*range(0, len(layers), size), len(layers))


def _starts(runs: Sequence[int], size: int) -> Iterator[int]:
    start = 0
    for run in runs:
        yield from range(start, start + run, size)
        start += run
