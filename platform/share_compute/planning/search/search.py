"""The search for layouts with a short step time by the cost formula."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

from share_compute.planning.cost.bound import lower_bound_s
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout
from share_compute.planning.cost.options import Options
from share_compute.planning.search.all_orders import MOST_MACHINES, best_in_any_order
from share_compute.planning.search.fixed_order import best_in_order
from share_compute.planning.search.grouping import MOST_LAYERS, group
from share_compute.planning.search.halving import halve
from share_compute.planning.search.labels import BETTER, Suffixes
from share_compute.planning.search.limits import MANY, SearchLimits, limits_for
from share_compute.planning.search.moves import improve
from share_compute.planning.search.orders import orders, shortlist, simple_layouts

Method = Literal["auto", "orders", "dynamic_programming", "recursive"]
_EXACT_BUDGET: Final = 60_000_000
"""Approximate number of examined candidates, some seconds of work, after which a search over all orders stops."""
_ORDERS_BUDGET: Final = 60_000_000
"""Number of examined candidates after which, for more than `MANY` machines, no further order is searched."""
_SIZES_OF_MANY: Final = (1, 2, 4, 8)
"""Numbers of members per stage in a beam search of one order, if the job does not set this number."""
_VARIED, _VARIED_WIDTH = 16, 8
"""Maximum number of machines, and beam width, in the search for layouts with other numbers of stages."""
_KEPT_OF_ORDER: Final = 3
_NEAR: Final = 2.0
"""Maximum step, as a multiple of the best step, of layouts that are kept for variety."""


class Found(NamedTuple):
    """One layout, with its step time by the cost formula."""

    layout: Layout
    step_s: float
    exact: bool
    """Whether the search proved that no layout with the requested stages and members has a lower `step_s`."""


def search(
    cost: TrainingCost,
    *,
    stages: int | None = None,
    members_per_stage: int | None = None,
    method: Method = "auto",
    finalists: int = 8,
    limits: SearchLimits | None = None,
) -> list[Found]:
    """Find different layouts with a short step time by the cost formula.

    The layouts pass `TrainingCost.may_fit`. The caller must check `TrainingCost.fits`, which also counts the gradient
    sets that a member holds.

    Args:
        cost: the cost model.
        stages: exact number of stages; None allows any.
        members_per_stage: exact number of members in each stage; None allows any.
        method: ``dynamic_programming`` takes machines in the order of the topology. ``recursive`` halves machines and
            layers recursively. ``orders`` tries simple layouts, several orders, a beam search and local moves. ``auto``
            adds an exact search of all orders for up to `MOST_MACHINES` usable machines.
        finalists: maximum number of layouts.
        limits: limits that replace the defaults for the number of machines, for experiments.

    Returns:
        Layouts, the fastest first; an empty list if none was found.
    """
    deep = None
    if cost.num_layers > MOST_LAYERS and method != "recursive":
        deep = group(cost, stages or 0)
    run = _Search(deep.coarse if deep else cost, stages, members_per_stage, limits)
    if run.sizes:
        if method in {"auto", "orders"}:
            run.auto(any_order=method == "auto")
        elif method == "recursive":
            run.offer(halve(cost, run.rates, run.candidates))
        else:
            run.in_order(run.candidates)
    if deep is None:
        return run.results(finalists)
    fine = _Search(cost, stages, members_per_stage)
    fine.offer(layout for each in run.results(finalists) if (layout := deep.refined(each.layout)))
    if not fine.known and fine.sizes:
        # A machine that cannot hold a group of layers may hold a single layer, so search the single layers.
        fine.offer(halve(cost, fine.rates, fine.candidates))
    return fine.results(finalists)


def all_below(
    cost: TrainingCost,
    ceiling_s: float,
    *,
    stages: int | None = None,
    members_per_stage: int | None = None,
    budget: float,
) -> tuple[list[Layout], int]:
    """Find the layouts below a ceiling that no other layout on the same machines dominates.

    `share_compute.planning.search.labels` defines domination. Among layouts that differ only in the choice between
    identical machines, one is returned.

    Args:
        cost: the cost model.
        ceiling_s: step time in seconds that layouts must be below, by the cost formula.
        stages: exact number of stages; None allows any.
        members_per_stage: exact number of members in each stage; None allows any.
        budget: approximate number of examined candidates after which the search stops.

    Returns:
        Layouts, the fastest first, and the number of examined candidates. Returns no layouts for more than
        `MOST_MACHINES` machines or for models with more than `MOST_LAYERS` layers.
    """
    run = _Search(cost, stages, members_per_stage)
    if not run.sizes or len(run.candidates) > MOST_MACHINES or cost.num_layers > MOST_LAYERS:
        return [], 0
    suffixes = Suffixes(cost, run.options, ceiling_s)
    ids, _ = best_in_any_order(
        suffixes, run.candidates, sizes=run.sizes, stages=stages, budget=budget, all_below=True
    )
    return [suffixes.layout(each) for each in ids], suffixes.examined


class _Search:
    def __init__(
        self,
        cost: TrainingCost,
        stages: int | None,
        members_per_stage: int | None,
        limits: SearchLimits | None = None,
    ) -> None:
        self.cost, self.stages, self.members_per_stage = cost, stages, members_per_stage
        self.options = Options(cost)
        self.known: dict[Layout, float] = {}
        self.best_s = math.inf
        self.examined = 0
        self.proved = False
        self.sizes: list[int] = []
        self.candidates: list[int] = []
        self._forced = limits
        usable = self.options.usable
        if not usable:
            return
        self.rates = Suffixes(cost, self.options, math.inf).rates
        self.candidates = shortlist(cost, self.rates)
        self.rates = {machine: self.rates[machine] for machine in self.candidates}
        widest = min(cost.workload.microbatches, len(self.candidates))
        if members_per_stage is not None:
            self.sizes = [members_per_stage] if members_per_stage <= widest else []
        else:
            self.sizes = list(range(1, widest + 1))

    def offer(self, layouts: Iterable[Layout]) -> None:
        """Add the layouts that meet the request, pass `TrainingCost.may_fit` and need no dead link."""
        for layout in layouts:
            if layout in self.known or not self._is_as_requested(layout):
                continue
            step_s = self.cost.step_s(layout)
            if math.isfinite(step_s) and self.cost.may_fit(layout):
                self.known[layout] = step_s
                self.best_s = min(self.best_s, step_s)

    def _is_as_requested(self, layout: Layout) -> bool:
        sizes = {len(stage.members) for stage in layout.stages}
        return (self.stages is None or len(layout.stages) == self.stages) and (
            self.members_per_stage is None or sizes == {self.members_per_stage}
        )

    def in_order(self, order: Sequence[int]) -> None:
        """Search one order of machines, and add its best layouts to `known`."""
        width = self._limits.width_of(self.cost, len(order))
        self.examined += self._search(order, self.best_s, self.stages, width)

    @property
    def _limits(self) -> SearchLimits:
        return self._forced or limits_for(len(self.candidates))

    def _search(self, order: Sequence[int], ceiling_s: float, stages: int | None, width: int | None) -> int:
        """Search one order of machines and add its best layouts; return the number of examined candidates."""
        suffixes = Suffixes(self.cost, self.options, ceiling_s)
        sizes = self.sizes
        if width is not None and self.members_per_stage is None:
            sizes = [size for size in sizes if size in _SIZES_OF_MANY]
        ids = best_in_order(suffixes, order, sizes=sizes, stages=stages, width=width)
        self.offer(suffixes.layout(each) for each in ids[:_KEPT_OF_ORDER])
        return suffixes.examined

    def auto(self, *, any_order: bool) -> None:
        """Run the searches of the method ``auto``, or of ``orders`` if ``any_order`` is false."""
        found = orders(self.cost, self.rates)[: self._limits.orders]
        for order in found[:3]:
            self.offer(simple_layouts(self.cost, order, self.rates))
        self.offer(halve(self.cost, self.rates, found[0]))
        for order in found:
            if len(self.candidates) <= MANY or self.examined <= _ORDERS_BUDGET:
                self.in_order(order)
        if any_order and len(self.options.usable) <= MOST_MACHINES:
            suffixes = Suffixes(self.cost, self.options, self.best_s)
            ids, self.proved = best_in_any_order(
                suffixes, self.candidates, sizes=self.sizes, stages=self.stages, budget=_EXACT_BUDGET
            )
            self.offer(suffixes.layout(each) for each in ids[:_KEPT_OF_ORDER])
        if not self.proved:
            self._beam()
        for start in [] if self.proved else self._starts():
            self.offer(
                improve(self.cost, self.options, self.rates, start, self.sizes, self.stages, self._forced)
            )
        if self.known:
            self._vary()

    def _beam(self) -> None:
        """Run a beam search over all orders of the fastest machines."""
        chosen = sorted(self.candidates, key=lambda machine: (-self.rates[machine], machine))
        suffixes = Suffixes(self.cost, self.options, self.best_s)
        ids, _ = best_in_any_order(
            suffixes,
            sorted(chosen[: self._limits.beam_machines]),
            sizes=self.sizes,
            stages=self.stages,
            width=self._limits.beam,
            budget=_EXACT_BUDGET,
        )
        self.offer(suffixes.layout(each) for each in ids[:_KEPT_OF_ORDER])

    def _starts(self) -> list[Layout]:
        """Return the fastest layouts, one for each order of machines, as starting points of the local search."""
        by_order: dict[tuple[int, ...], Layout] = {}
        for layout in sorted(self.known, key=lambda layout: (self.known[layout], layout)):
            by_order.setdefault(layout.machines, layout)
        return list(by_order.values())[: self._limits.starts]

    @property
    def best(self) -> Layout:
        """The fastest layout so far."""
        return min(self.known, key=lambda layout: (self.known[layout], layout))

    def _vary(self) -> None:
        """Search layouts with other numbers of stages, and layouts with one member in each stage.

        One of them may be the fastest in the simulation, which includes waits that the cost formula omits.
        """
        count, used = len(self.best.stages), self.best.machines
        order = (*used, *(machine for machine in self.candidates if machine not in set(used)))[:_VARIED]
        ceiling_s = _NEAR * self.best_s
        counts = [self.stages] if self.stages is not None else list(range(max(1, count - 2), count + 3))
        counts = [stages for stages in counts if stages <= min(len(order), self.cost.num_layers)]
        for stages in counts:
            if stages != count:
                self._search(order, ceiling_s, stages, _VARIED_WIDTH)
        if self.members_per_stage is None and len(used) > count:
            self.offer(self._of_single_machines(ceiling_s))

    def _of_single_machines(self, ceiling_s: float) -> list[Layout]:
        """Return layouts of a separate search with one member in each stage."""
        single = _Search(self.cost, self.stages, 1, self._forced)
        single.options, single.best_s = self.options, ceiling_s
        if len(self.candidates) > MANY:
            single.in_order(orders(self.cost, self.rates)[0])
        elif single.sizes:
            single.auto(any_order=self._forced is None)
        return list(single.known)

    def results(self, finalists: int) -> list[Found]:
        """Return at most ``finalists`` layouts, the fastest first.

        Prefer the best layout, then the best of each kind, then the best of each set of machines, then other fast
        layouts.
        """
        ranked = sorted(self.known, key=lambda layout: (self.known[layout], layout))
        near = [layout for layout in ranked if self.known[layout] <= _NEAR * self.best_s]
        kinds = {_kind(layout): layout for layout in reversed(near)}
        sets = {frozenset(layout.machines): layout for layout in reversed(near)}
        firsts = sorted(kinds.values(), key=ranked.index), sorted(sets.values(), key=ranked.index)
        chosen = list(dict.fromkeys([*ranked[:1], *firsts[0], *firsts[1], *ranked]))[:finalists]
        chosen.sort(key=lambda layout: (self.known[layout], layout))
        if chosen and not self.proved:
            self.proved = self.best_s * BETTER <= lower_bound_s(self.cost)
        return [
            Found(layout, self.known[layout], exact=index == 0 and self.proved)
            for index, layout in enumerate(chosen)
        ]


def _kind(layout: Layout) -> tuple[int, bool]:
    """Return the kind of a layout: the number of stages, and whether each stage has one machine."""
    return len(layout.stages), len(layout.machines) == len(layout.stages)
