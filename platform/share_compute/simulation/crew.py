"""Who works in a simulated job: plans by the real planner, and spares that take the place of the dead.

The first plan is the planner's own, of all machines. Later searches show it a few of a large fleet, so that each takes
a second: half of them the fastest of all, the rest the fastest of each region in turn, the best linked regions first;
all only where those few cannot hold the job. Of more than `_LEAST_CANDIDATES`, cuts are searched in one order of the
machines, not in all. A member that dies is replaced in its place, without a search, by a machine of its kind that can
hold what it held, if a step takes about as long with it; only when there is none, the planner searches again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from share_compute.errors import PlanInfeasible
from share_compute.planning.cost import TrainingCost
from share_compute.planning.layout import Layout, PoolLayout
from share_compute.planning.partitioning import load_strategy
from share_compute.planning.planner import solve
from share_compute.planning.problem import Problem
from share_compute.planning.profile import ModelProfile
from share_compute.planning.regions import complete
from share_compute.planning.schedule_simulator import simulate_step
from share_compute.planning.strategies import AutoPartitioning, DynamicProgrammingPartitioning
from share_compute.specification import TrainJob
from share_compute.topology import Topology

_LEAST_CANDIDATES = 16
"""Machines of a large fleet that a later search looks at; twice the members of the present plan if that is more."""
_SLOWER = 1.1
"""With a spare, a step takes at most so many times what it took."""
_MOST_SPARES = 8
"""Spares that are tried, fastest first: of the dead one's region, and of all."""
_MOST_CELLS = 20_000
"""Steps with more cells are taken from the formula: a simulation of each would take seconds."""

Flags = NDArray[np.bool_]


class Crew:
    """Plans one job on whichever machines of a fleet are there.

    Args:
        spec: the job.
        topology: the fleet.
        profile: the job's model.
    """

    def __init__(self, spec: TrainJob, topology: Topology, profile: ModelProfile) -> None:
        self._spec, self._topology, self._profile = spec, topology, profile
        self._strategy = load_strategy(spec.parallelism.strategy)
        self._most_candidates = _LEAST_CANDIDATES
        self._refused: Flags | None = None
        self.cost: TrainingCost
        """Of the number of microbatches that the first plan chose."""

    @cached_property
    def flops_per_s(self) -> NDArray[np.float64]:
        """Measured speed of each machine."""
        return np.array([machine.flops_per_s() for machine in self._topology.contributors])

    def first_plan(self) -> Layout:
        """Plan on all machines as `share_compute.planning.plan.make_plan` does, and keep to its number of microbatches.

        Raises:
            PlanInfeasible: the machines cannot hold the job; says what is missing.
        """
        solution = solve(self._spec, self._topology, self._profile, 0, {})
        planned = solution.cost.topology.contributors
        place = {machine.id: index for index, machine in enumerate(self._topology.contributors)}
        layout = solution.layout.renumbered([place[machine.id] for machine in planned])
        self.cost = solution.cost
        if planned != self._topology.contributors:  # some were not measured
            self.cost = replace(self.cost, topology=self._topology, network=complete(self._topology))
        self._most_candidates = max(_LEAST_CANDIDATES, 2 * len(layout.machines))
        return layout

    def plan(self, alive: Flags) -> Layout | None:
        """Plan again; None when the machines cannot hold the job."""
        if self._refused is not None and not (alive & ~self._refused).any():
            return None  # no more machines than when all of them could not
        there = [int(machine) for machine in np.flatnonzero(alive & (self.flops_per_s > 0))]
        few = self._candidates(there)
        layout = self._search(few)
        if layout is None and len(few) < len(there):
            layout = self._search(there)
        self._refused = alive.copy() if layout is None else None
        return layout

    def step_s(self, layout: Layout) -> float:
        """Return the time of a step."""
        return _step_s(self.cost, layout)

    def replaced(self, layout: Layout, dead: int, alive: Flags) -> Layout | None:
        """Return the layout with a spare in the place of the dead; None when no machine is like it."""
        place, seat = next(
            (place, pool.members.index(dead))
            for place, pool in enumerate(layout.pools)
            if dead in pool.members
        )
        pool, cost = layout.pools[place], self.cost
        kind = np.array(cost.kinds) == cost.kinds[dead]
        able = alive & kind & (cost.memory_bytes >= cost.member_bytes(layout, place, seat))
        near = cost.network.region == cost.network.region[dead]
        if len(pool.members) > 1:
            able &= near
        able[list(layout.machines)] = False
        able[dead] = False
        cells = self._cells(pool)
        spares = dict.fromkeys((*_first(able & near, cells), *_first(able, cells)))
        tried = [
            Layout(
                (
                    *layout.pools[:place],
                    pool._replace(members=(*pool.members[:seat], spare, *pool.members[seat + 1 :])),
                    *layout.pools[place + 1 :],
                )
            )
            for spare in spares
        ]
        best = min(tried, key=lambda one: (cost.step_s(one), one), default=None)
        return best if best and self.step_s(best) <= _SLOWER * self.step_s(layout) else None

    def _cells(self, pool: PoolLayout) -> NDArray[np.float64]:
        """Return the time of one microbatch in a pool on each machine; infinite without speed."""
        through = self.cost.forward_s + self.cost.backward_s
        with np.errstate(invalid="ignore"):
            cells = through[:, pool.stop] - through[:, pool.start]
        return np.where(np.isnan(cells), np.inf, cells)

    def _search(self, machines: Sequence[int]) -> Layout | None:
        """Return the layout with the shortest step; None when these machines cannot hold the job."""
        part = self.cost.part(machines)
        asked = self._spec.parallelism
        strategy = self._strategy
        if isinstance(strategy, AutoPartitioning) and len(machines) > _LEAST_CANDIDATES:
            strategy = (
                DynamicProgrammingPartitioning()
            )  # the other takes many seconds, and there are many searches in a day
        problem = Problem(part, pools=asked.pools, members_per_pool=asked.members_per_pool)
        try:
            fitting = [one.layout for one in strategy.place(problem) if part.fits(one.layout)]
        except PlanInfeasible:
            return None
        step_s, chosen = min(
            ((_step_s(part, layout), layout) for layout in fitting), default=(math.inf, None)
        )
        return chosen.renumbered(machines) if chosen is not None and step_s < math.inf else None

    def _candidates(self, there: Sequence[int]) -> list[int]:
        """Return the machines that a later search is shown, of those that are there."""
        most = self._most_candidates
        fastest = sorted(there, key=lambda machine: (-self.flops_per_s[machine], machine))
        chosen = dict.fromkeys(fastest[: most // 2] if len(fastest) > most else fastest)
        for machine in self._by_region(fastest):
            if len(chosen) >= most:
                break
            chosen[machine] = None
        return sorted(chosen)

    def _by_region(self, fastest: Sequence[int]) -> Iterator[int]:
        """Yield the fastest of each region, then the second of each; the best linked regions first."""
        groups: dict[int, list[int]] = {}
        for machine in fastest:
            groups.setdefault(int(self.cost.network.region[machine]), []).append(machine)
        rates = self.cost.network.bytes_per_s
        regions = sorted(groups, key=lambda region: (-rates[region, region], region))
        for turn in range(max(map(len, groups.values()), default=0)):
            yield from (groups[region][turn] for region in regions if turn < len(groups[region]))


def _first(able: Flags, cells: NDArray[np.float64]) -> list[int]:
    """Return the fastest machines of those that are able."""
    machines = np.flatnonzero(able)
    return [int(machine) for machine in machines[np.argsort(cells[machines], kind="stable")][:_MOST_SPARES]]


def _step_s(cost: TrainingCost, layout: Layout) -> float:
    cells = 2 * cost.workload.microbatches * len(layout.pools)
    return simulate_step(cost, layout).step_s if cells <= _MOST_CELLS else cost.step_s(layout)
