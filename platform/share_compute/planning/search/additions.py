"""Layouts that add one idle machine to another layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.cost.schedule_simulator import simulate_step
from share_compute.planning.search.problem import SearchProblem

_MOST_TRIED: Final = 12


class Addition(NamedTuple):
    """A layout with one additional machine."""

    layout: Layout
    step_s: float
    """Simulated step time in seconds."""


class Additions:
    """Cache of layouts with one additional machine, for the fastest idle machines."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Layout], dict[int, Addition | None]] = {}

    def of(self, problem: SearchProblem, layout: Layout) -> dict[int, Addition | None]:
        """Return, for each of the fastest idle machines, the best layout that adds the machine to ``layout``.

        Keys are machine indices. Best means the shortest step by the cost formula. The value is None if no layout that
        was tried fits. Results are cached.
        """
        key = problem.cost.workload.microbatches, layout
        if key not in self._known:
            self._known[key] = {
                machine: _best_with(problem, layout, machine)
                for machine in worth_trying(problem.cost, layout)
            }
        return self._known[key]


def worth_trying(cost: TrainingCost, layout: Layout) -> list[int]:
    """Return the fastest idle machines, at most `_MOST_TRIED`, the fastest first."""
    used = set(layout.machines)
    idle = [machine for machine in range(cost.num_machines) if machine not in used]
    speeds = [machine.flops_per_s() for machine in cost.topology.contributors]
    return sorted(idle, key=lambda machine: (-speeds[machine], machine))[:_MOST_TRIED]


def _best_with(problem: SearchProblem, layout: Layout, machine: int) -> Addition | None:
    layouts = [each for each in _with(problem, layout.stages, machine) if problem.cost.fits(each)]
    if not layouts:
        return None
    best = min(layouts, key=problem.cost.step_s)
    return Addition(best, simulate_step(problem.cost, best).step_s)


def _with(problem: SearchProblem, stages: Sequence[StageLayout], machine: int) -> Iterator[Layout]:
    cost = problem.cost
    for place, stage in enumerate(stages):
        members = (*stage.members, machine)
        shares = cost.shares(members, stage.start, stage.stop) if cost.may_share(members) else None
        if shares is not None and problem.members_per_stage is None:
            yield _replaced(stages, place, StageLayout(stage.start, stage.stop, members, shares))
    if problem.stages is not None or problem.members_per_stage not in (None, 1):
        return
    whole = (cost.workload.microbatches,)
    for place, stage in enumerate(stages):
        for part in sorted({1, _fair_part(cost, machine, stage)}):
            if part < stage.stop - stage.start:
                head = StageLayout(stage.start, stage.start + part, (machine,), whole)
                yield from _reshared(cost, stages, place, head, stage._replace(start=head.stop))
                tail = StageLayout(stage.stop - part, stage.stop, (machine,), whole)
                yield from _reshared(cost, stages, place, stage._replace(stop=tail.start), tail)


def _reshared(
    cost: TrainingCost, stages: Sequence[StageLayout], place: int, *new: StageLayout
) -> Iterator[Layout]:
    """Yield a layout in which new stages, with new shares of microbatches, replace one stage.

    Yield nothing if a share would be 0.
    """
    shared = []
    for stage in new:
        shares = cost.shares(stage.members, stage.start, stage.stop)
        if shares is None:
            return
        shared.append(stage._replace(shares=shares))
    yield _replaced(stages, place, *shared)


def _fair_part(cost: TrainingCost, machine: int, stage: StageLayout) -> int:
    speeds = [cost.topology.contributors[each].flops_per_s() for each in (machine, *stage.members)]
    return max(1, round((stage.stop - stage.start) * speeds[0] / sum(speeds)))


def _replaced(stages: Sequence[StageLayout], place: int, *new: StageLayout) -> Layout:
    return Layout((*stages[:place], *new, *stages[place + 1 :]))
