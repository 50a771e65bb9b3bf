"""Selects the numbers of microbatches that get a full search."""

from __future__ import annotations

import math
from collections.abc import Sequence

from share_compute.planning.cost.layout import solo
from share_compute.planning.search.choice import rounded
from share_compute.planning.search.problem import SearchProblem
from share_compute.planning.search.strategies import RecursivePartitioning

_MOST = 6
"""Maximum number of problems (one for each number of microbatches) that get a full search."""
_SMALL = 8
"""Maximum number of machines for which several problems get a full search.

With more machines, only one problem does, unless the quick search finds no plan.
"""


def worth_searching(problems: Sequence[SearchProblem]) -> list[SearchProblem]:
    """Return the problems that get a full search: all if they are few, otherwise the best ones of a quick search.

    If the quick search finds no plan for any problem, select problems at about even intervals from the whole list.

    Args:
        problems: the job, once for each number of microbatches that may be chosen.
    """
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


def _quick_s(problem: SearchProblem) -> float:
    """Return the step time in seconds of the best plan of a quick search; infinite if it finds none."""
    cost = problem.cost
    layouts = [candidate.layout for candidate in RecursivePartitioning().place(problem)]
    if problem.stages in (None, 1) and problem.members_per_stage in (None, 1):
        layouts += [
            solo(machine, cost.num_layers, cost.workload.microbatches) for machine in range(cost.num_machines)
        ]
    return min((cost.step_s(layout) for layout in layouts if cost.fits(layout)), default=math.inf)
