"""The search for the layout with the smallest predicted step: exact for few machines, near it for many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

from share_compute.planning.all_orders import MOST_MACHINES, best_in_any_order
from share_compute.planning.bound import lower_bound_s
from share_compute.planning.cost import TrainingCost
from share_compute.planning.fixed_order import best_in_order
from share_compute.planning.grouping import MOST_LAYERS, group
from share_compute.planning.halving import halve
from share_compute.planning.labels import BETTER, Suffixes
from share_compute.planning.layout import Layout
from share_compute.planning.limits import MANY, Limits, limits_for
from share_compute.planning.moves import improve
from share_compute.planning.options import Options
from share_compute.planning.orders import orders, shortlist, simple_layouts

Method = Literal["auto", "orders", "dynamic_programming", "recursive"]
_EXACT_BUDGET: Final = 60_000_000
"""Candidates that the search over all orders looks at before it gives up its proof; some seconds."""
_ORDERS_BUDGET: Final = 60_000_000
"""Candidates in the orders of many machines; one more order is searched while there are less."""
_SIZES_OF_MANY: Final = (1, 2, 4, 8)
"""Members of a pool that are tried where not all can be."""
_VARIED, _VARIED_WIDTH = 16, 8
"""Machines, and suffixes kept, in the search for layouts with other numbers of pools."""
_KEPT_OF_ORDER: Final = 3
_NEAR: Final = 2.0
"""Finalists that are there for their kind take at most so many times as long as the best."""


class Found(NamedTuple):
    """One layout that fits, as far as each pool by itself tells."""

    layout: Layout
    step_s: float
    """By the formula of `share_compute.planning.cost`."""
    exact: bool
    """Whether no layout of these machines, with the pools that were asked for, has a smaller formula: proved."""


def search(
    cost: TrainingCost,
    *,
    pools: int | None = None,
    members_per_pool: int | None = None,
    method: Method = "auto",
    finalists: int = 8,
    limits: Limits | None = None,
) -> list[Found]:
    """Find layouts with a small predicted step, all different and within memory, as far as one pool by itself tells.

    What is proved: for up to `MOST_MACHINES` usable machines, ``auto`` goes through all sets of machines, all orders
    of pools, all members that may pool, and all cuts of the layers. If it comes to the end within its budget, the first
    layout is the best there is, and ``exact`` says so. It also says so where the step equals the lower bound. Of models
    with more than `MOST_LAYERS` layers, neighbours are searched as one; then only the bound can prove a layout best.

    Args:
        cost: the objective.
        pools: exactly that many pools.
        members_per_pool: exactly that many members in each pool.
        method: ``dynamic_programming`` takes machines in the order of the topology; ``recursive`` halves machines and
            layers again and again; ``orders`` tries simple layouts, several orders and local moves; ``auto`` does that
            too, and all orders where it can.
        finalists: most layouts to return; those behind the first differ from it in pools or come close to it.
        limits: in place of those of the number of machines, to measure what they cost.

    Returns:
        The fastest first; empty when nothing fits.
    """
    deep = None
    if cost.num_layers > MOST_LAYERS and method != "recursive":
        deep = group(cost, pools or 0)
    run = _Search(deep.coarse if deep else cost, pools, members_per_pool, limits)
    if run.sizes:
        if method in {"auto", "orders"}:
            run.auto(any_order=method == "auto")
        elif method == "recursive":
            run.offer(halve(cost, run.rates, run.candidates))
        else:
            run.in_order(run.candidates)
    if deep is None:
        return run.results(finalists)
    fine = _Search(cost, pools, members_per_pool)
    fine.offer(layout for each in run.results(finalists) if (layout := deep.refined(each.layout)))
    if not fine.known and fine.sizes:
        # Some machine may hold a layer where it cannot hold a group.
        fine.offer(halve(cost, fine.rates, fine.candidates))
    return fine.results(finalists)


def all_below(
    cost: TrainingCost,
    ceiling_s: float,
    *,
    pools: int | None = None,
    members_per_pool: int | None = None,
    budget: float,
) -> tuple[list[Layout], int]:
    """Find, of each set of at most `MOST_MACHINES` machines, the layouts that no other of the set replaces.

    One replaces another if its formula is as good with the same first pool, as the schedule sees it.

    Args:
        cost: the objective.
        ceiling_s: only those whose formula is below it.
        pools: exactly that many pools.
        members_per_pool: exactly that many members in each pool.
        budget: candidates to look at; then the largest sets are left out.

    Returns:
        The fastest first, and how many candidates were looked at. None of models with more than `MOST_LAYERS` layers.
    """
    run = _Search(cost, pools, members_per_pool)
    if not run.sizes or len(run.candidates) > MOST_MACHINES or cost.num_layers > MOST_LAYERS:
        return [], 0
    suffixes = Suffixes(cost, run.options, ceiling_s)
    ids, _ = best_in_any_order(
        suffixes, run.candidates, sizes=run.sizes, pools=pools, budget=budget, all_below=True
    )
    return [suffixes.layout(each) for each in ids], suffixes.looked_at


class _Search:
    def __init__(
        self,
        cost: TrainingCost,
        pools: int | None,
        members_per_pool: int | None,
        limits: Limits | None = None,
    ) -> None:
        self.cost, self.pools, self.members_per_pool = cost, pools, members_per_pool
        self.options = Options(cost)
        self.known: dict[Layout, float] = {}
        self.best_s = math.inf
        self.looked_at = 0
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
        if members_per_pool is not None:
            self.sizes = [members_per_pool] if members_per_pool <= widest else []
        else:
            self.sizes = list(range(1, widest + 1))

    def offer(self, layouts: Iterable[Layout]) -> None:
        """Take layouts into account that may fit and have the pools that were asked for."""
        for layout in layouts:
            if layout in self.known or not self._as_asked(layout):
                continue
            step_s = self.cost.step_s(layout)
            if math.isfinite(step_s) and self.cost.may_fit(layout):
                self.known[layout] = step_s
                self.best_s = min(self.best_s, step_s)

    def _as_asked(self, layout: Layout) -> bool:
        sizes = {len(pool.members) for pool in layout.pools}
        return (self.pools is None or len(layout.pools) == self.pools) and (
            self.members_per_pool is None or sizes == {self.members_per_pool}
        )

    def in_order(self, order: Sequence[int]) -> None:
        """Search one order of machines."""
        width = self._limits.width_of(self.cost, len(order))
        self.looked_at += self._search(order, self.best_s, self.pools, width)

    @property
    def _limits(self) -> Limits:
        return self._forced or limits_for(len(self.candidates))

    def _search(self, order: Sequence[int], ceiling_s: float, pools: int | None, width: int | None) -> int:
        """Search one order of machines; return how many candidates that took."""
        suffixes = Suffixes(self.cost, self.options, ceiling_s)
        sizes = self.sizes
        if width is not None and self.members_per_pool is None:
            sizes = [size for size in sizes if size in _SIZES_OF_MANY]
        ids = best_in_order(suffixes, order, sizes=sizes, pools=pools, width=width)
        self.offer(suffixes.layout(each) for each in ids[:_KEPT_OF_ORDER])
        return suffixes.looked_at

    def auto(self, *, any_order: bool) -> None:
        """Try everything that the number of machines allows."""
        found = orders(self.cost, self.rates)[: self._limits.orders]
        for order in found[:3]:
            self.offer(simple_layouts(self.cost, order, self.rates))
        self.offer(halve(self.cost, self.rates, found[0]))
        for order in found:
            if len(self.candidates) <= MANY or self.looked_at <= _ORDERS_BUDGET:
                self.in_order(order)
        if any_order and len(self.options.usable) <= MOST_MACHINES:
            suffixes = Suffixes(self.cost, self.options, self.best_s)
            ids, self.proved = best_in_any_order(
                suffixes, self.candidates, sizes=self.sizes, pools=self.pools, budget=_EXACT_BUDGET
            )
            self.offer(suffixes.layout(each) for each in ids[:_KEPT_OF_ORDER])
        if not self.proved:
            self._beam()
        for start in [] if self.proved else self._starts():
            self.offer(
                improve(self.cost, self.options, self.rates, start, self.sizes, self.pools, self._forced)
            )
        if self.known:
            self._vary()

    def _beam(self) -> None:
        """Search all orders of the machines that look best, with the most promising suffixes alone."""
        chosen = sorted(self.candidates, key=lambda machine: (-self.rates[machine], machine))
        suffixes = Suffixes(self.cost, self.options, self.best_s)
        ids, _ = best_in_any_order(
            suffixes,
            sorted(chosen[: self._limits.beam_machines]),
            sizes=self.sizes,
            pools=self.pools,
            width=self._limits.beam,
            budget=_EXACT_BUDGET,
        )
        self.offer(suffixes.layout(each) for each in ids[:_KEPT_OF_ORDER])

    def _starts(self) -> list[Layout]:
        """Return good layouts with different orders of machines, for local moves to begin with."""
        by_order: dict[tuple[int, ...], Layout] = {}
        for layout in sorted(self.known, key=lambda layout: (self.known[layout], layout)):
            by_order.setdefault(layout.machines, layout)
        return list(by_order.values())[: self._limits.starts]

    @property
    def best(self) -> Layout:
        """The fastest layout so far."""
        return min(self.known, key=lambda layout: (self.known[layout], layout))

    def _vary(self) -> None:
        """Look for good layouts that differ in kind, for the simulator to choose from.

        It sees waits that the formula does not price, which differ by the number of pools, and between pools of one and
        of several.
        """
        count, used = len(self.best.pools), self.best.machines
        order = (*used, *(machine for machine in self.candidates if machine not in set(used)))[:_VARIED]
        ceiling_s = _NEAR * self.best_s
        counts = [self.pools] if self.pools is not None else list(range(max(1, count - 2), count + 3))
        counts = [pools for pools in counts if pools <= min(len(order), self.cost.num_layers)]
        for pools in counts:
            if pools != count:
                self._search(order, ceiling_s, pools, _VARIED_WIDTH)
        if self.members_per_pool is None and len(used) > count:
            self.offer(self._of_single_machines(ceiling_s))

    def _of_single_machines(self, ceiling_s: float) -> list[Layout]:
        """Search once more without pools of several members."""
        single = _Search(self.cost, self.pools, 1, self._forced)
        single.options, single.best_s = self.options, ceiling_s
        if len(self.candidates) > MANY:
            single.in_order(orders(self.cost, self.rates)[0])
        elif single.sizes:
            single.auto(any_order=self._forced is None)
        return list(single.known)

    def results(self, finalists: int) -> list[Found]:
        """Return the best, the best of each kind, the best of each set of machines, then whatever is fast."""
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
    """Return what finalists shall differ in: the number of pools, and whether each is one machine."""
    return len(layout.pools), len(layout.machines) == len(layout.pools)
