"""Chooses the members of a simulated job: plans with the real planner, and replaces dead members by spares.

The first plan is the planner's own, over all machines. To save time, later searches consider only some machines of a
large fleet: the fastest ones, and the fastest ones of each region. If these cannot hold the job, a search considers all
machines.

A dead member is replaced without a search by a machine of the same kind with enough memory, if a step then takes at
most `_SLOWER` times as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from share_compute.errors import PlanInfeasible
from share_compute.models.profiles.profile import ModelProfile
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.cost.schedule_simulator import simulate_step
from share_compute.planning.network.regions import complete
from share_compute.planning.planner import solve
from share_compute.planning.search.choice import least_penalized
from share_compute.planning.search.partitioning import load_strategy
from share_compute.planning.search.problem import SearchProblem
from share_compute.planning.search.strategies import AutoPartitioning, DynamicProgrammingPartitioning
from share_compute.planning.search.thorough import proposed
from share_compute.specification import TrainJob
from share_compute.topology import Topology

_LEAST_CANDIDATES = 16
"""Minimum limit on the number of machines that a later search considers. The limit is twice the number of members in
the first plan, but not less than this."""
_SLOWER = 1.1
"""Maximum ratio of the step time with the spare to the step time with the dead member."""
_MOST_SPARES = 8
"""Maximum number of spares (the fastest) to try from the dead member's region, and again from all regions."""
_MOST_CELLS = 20_000
"""Maximum number of cells in a step whose time is simulated. For larger steps, `TrainingCost.step_s` gives the time.

A cell is the forward or the backward of one microbatch in one stage.
"""

Flags = NDArray[np.bool_]


class FleetPlanner:
    """Plans one job on the machines of a fleet that are present.

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
        """Cost tables for the number of microbatches that the first plan chose; set by `first_plan`."""

    @cached_property
    def flops_per_s(self) -> NDArray[np.float64]:
        """Measured speed of each machine in FLOP/s, shape ``[machines]``."""
        return np.array([machine.flops_per_s() for machine in self._topology.contributors])

    def first_plan(self) -> Layout:
        """Plan on all machines as `share_compute.planning.planner.solve` does.

        Later plans keep the number of microbatches of this plan.

        Raises:
            PlanInfeasible: the machines cannot hold the job; the error says what is missing.
        """
        solution = solve(self._spec, self._topology, self._profile, 0, {})
        planned = solution.cost.topology.contributors
        place = {machine.id: index for index, machine in enumerate(self._topology.contributors)}
        layout = solution.layout.renumbered([place[machine.id] for machine in planned])
        self.cost = solution.cost
        if planned != self._topology.contributors:  # the planner left out unmeasured machines
            self.cost = replace(self.cost, topology=self._topology, network=complete(self._topology))
        self._most_candidates = max(_LEAST_CANDIDATES, 2 * len(layout.machines))
        return layout

    def plan(self, alive: Flags) -> Layout | None:
        """Return a new plan for the present machines; None if they cannot hold the job.

        Args:
            alive: whether each machine is present, shape ``[machines]``.
        """
        if self._refused is not None and not (alive & ~self._refused).any():
            return None  # no machine was added since the last search over all present machines failed
        there = [int(machine) for machine in np.flatnonzero(alive & (self.flops_per_s > 0))]
        few = self._candidates(there)
        layout = self._search(few)
        if layout is None and len(few) < len(there):
            layout = self._search(there)
        self._refused = alive.copy() if layout is None else None
        return layout

    def step_s(self, layout: Layout) -> float:
        """Return the time of a step in seconds."""
        return _step_s(self.cost, layout)

    def replaced(self, layout: Layout, dead: int, alive: Flags) -> Layout | None:
        """Return the layout with a spare in the place of a dead member; None if no spare is similar enough."""
        place, index = next(
            (place, stage.members.index(dead))
            for place, stage in enumerate(layout.stages)
            if dead in stage.members
        )
        stage, cost = layout.stages[place], self.cost
        kind = np.array(cost.kinds) == cost.kinds[dead]
        able = alive & kind & (cost.memory_bytes >= cost.member_bytes(layout, place, index))
        near = cost.network.region == cost.network.region[dead]
        if len(stage.members) > 1:
            able &= near
        able[list(layout.machines)] = False
        able[dead] = False
        cells = self._cells(stage)
        spares = dict.fromkeys((*_first(able & near, cells), *_first(able, cells)))
        tried = [
            Layout(
                (
                    *layout.stages[:place],
                    stage._replace(members=(*stage.members[:index], spare, *stage.members[index + 1 :])),
                    *layout.stages[place + 1 :],
                )
            )
            for spare in spares
        ]
        best = min(tried, key=lambda one: (cost.step_s(one), one), default=None)
        return best if best and self.step_s(best) <= _SLOWER * self.step_s(layout) else None

    def _cells(self, stage: StageLayout) -> NDArray[np.float64]:
        """Return the seconds for forward and backward of a microbatch in a stage, by machine; infinite if unknown."""
        through = self.cost.forward_s + self.cost.backward_s
        with np.errstate(invalid="ignore"):
            cells = through[:, stage.stop] - through[:, stage.start]
        return np.where(np.isnan(cells), np.inf, cells)

    def _search(self, machines: Sequence[int]) -> Layout | None:
        """Return the layout with the shortest step; None if these machines cannot hold the job."""
        part = self.cost.part(machines)
        parallelism = self._spec.parallelism
        strategy = self._strategy
        if isinstance(strategy, AutoPartitioning) and len(machines) > _LEAST_CANDIDATES:
            # `AutoPartitioning` is too slow for the many searches of a simulation.
            strategy = DynamicProgrammingPartitioning()
        problem = SearchProblem(
            part, stages=parallelism.stages, members_per_stage=parallelism.members_per_stage
        )
        try:
            proposals = least_penalized(proposed(problem, strategy.place(problem)))
        except PlanInfeasible:
            return None
        layouts = [proposal.candidate.layout for proposal in proposals]
        step_s, chosen = min(
            ((_step_s(part, layout), layout) for layout in layouts), default=(math.inf, None)
        )
        return chosen.renumbered(machines) if chosen is not None and step_s < math.inf else None

    def _candidates(self, there: Sequence[int]) -> list[int]:
        """Return the machines among ``there`` that a later search considers."""
        most = self._most_candidates
        fastest = sorted(there, key=lambda machine: (-self.flops_per_s[machine], machine))
        chosen = dict.fromkeys(fastest[: most // 2] if len(fastest) > most else fastest)
        for machine in self._by_region(fastest):
            if len(chosen) >= most:
                break
            chosen[machine] = None
        return sorted(chosen)

    def _by_region(self, fastest: Sequence[int]) -> Iterator[int]:
        """Yield the fastest machine of each region, then the second fastest of each, and so on.

        Regions with faster internal links come first.
        """
        groups: dict[int, list[int]] = {}
        for machine in fastest:
            groups.setdefault(int(self.cost.network.region[machine]), []).append(machine)
        rates = self.cost.network.bytes_per_s
        regions = sorted(groups, key=lambda region: (-rates[region, region], region))
        for turn in range(max(map(len, groups.values()), default=0)):
            yield from (groups[region][turn] for region in regions if turn < len(groups[region]))


def _first(able: Flags, cells: NDArray[np.float64]) -> list[int]:
    """Return up to `_MOST_SPARES` eligible machines, fastest first."""
    machines = np.flatnonzero(able)
    return [int(machine) for machine in machines[np.argsort(cells[machines], kind="stable")][:_MOST_SPARES]]


def _step_s(cost: TrainingCost, layout: Layout) -> float:
    cells = 2 * cost.workload.microbatches * len(layout.stages)
    return simulate_step(cost, layout).step_s if cells <= _MOST_CELLS else cost.step_s(layout)
