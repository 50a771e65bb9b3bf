"""Which numbers of microbatches deserve a search, where a job leaves them open."""

from __future__ import annotations

import math
from collections.abc import Sequence

from share_compute.planning.choice import rounded
from share_compute.planning.layout import solo
from share_compute.planning.problem import Problem
from share_compute.planning.strategies import RecursivePartitioning

_MOST = 6
"""Numbers that are searched in earnest."""
_SMALL = 8
"""With more machines, only the number that a quick search prefers is."""


def worth_searching(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems, one for each number, that deserve a search: all of a few, else those a quick one prefers."""
    most = _MOST if problems[0].cost.num_machines <= _SMALL else 1
    if len(problems) <= most:
        return list(problems)
    quick_s = [_quick_s(problem) for problem in problems]
    order = sorted(range(len(problems)), key=lambda place: (rounded(quick_s[place]), place))
    able = [place for place in order if math.isfinite(quick_s[place])]
    if not able:
        spread = (len(problems) - 1) / (_MOST - 1)
        able = [round(place * spread) for place in range(_MOST)]
        most = len(able)
    return [problems[place] for place in sorted(set(able[:most]))]


def _quick_s(problem: Problem) -> float:
    """Return the step of a plan that is found fast."""
    cost = problem.cost
    layouts = [candidate.layout for candidate in RecursivePartitioning().place(problem)]
    if problem.pools in (None, 1) and problem.members_per_pool in (None, 1):
        layouts += [
            solo(machine, cost.num_layers, cost.workload.microbatches) for machine in range(cost.num_machines)
        ]
    return min((cost.step_s(layout) for layout in layouts if cost.fits(layout)), default=math.inf)
