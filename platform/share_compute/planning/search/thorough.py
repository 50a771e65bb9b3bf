"""The search of the strategy ``auto`` for the layout with the shortest simulated step.

The layout with the shortest step by the cost formula may be slower in the simulation than another layout. Therefore
these layouts are simulated, within budgets, unless their lower bound (`Proposal.floor_s`) rules them out:

1. Layouts of the other built-in strategies. For more than `MANY` machines, dynamic programming runs only at some
   numbers of microbatches.
2. Results of the search at the most promising numbers of microbatches.
3. For up to `MOST_MACHINES` machines: layouts whose step by the cost formula is below the best simulated step
   (`all_below`).
4. Layouts near the best ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from share_compute.planning.cost.bound import lower_bound_s
from share_compute.planning.cost.layout import Layout
from share_compute.planning.search.additions import Additions
from share_compute.planning.search.all_orders import MOST_MACHINES
from share_compute.planning.search.choice import Choice, Proposal, rounded
from share_compute.planning.search.counts import worth_searching
from share_compute.planning.search.limits import MANY
from share_compute.planning.search.nearby import nearby
from share_compute.planning.search.partitioning import Candidate
from share_compute.planning.search.problem import SearchProblem
from share_compute.planning.search.search import all_below
from share_compute.planning.search.strategies import AutoPartitioning

_MOST_EXAMINED = 6_000_000
"""Approximate maximum number of candidates that `_all_that_is_left` examines, over all problems."""
_CELLS = 1_000_000
"""Approximate maximum number of cells, 2 to 3 s of work, that a call of `_polish` or `_all_that_is_left` simulates."""
_PATIENCE = 8
"""Number of consecutive layouts without a neighbor that shortens the best step, after which the local search stops."""


def thorough(problems: Sequence[SearchProblem], additions: Additions) -> Choice:
    """Return the choice among all layouts that ``auto`` considers; empty if none was found.

    Args:
        problems: the job, once for each number of microbatches that may be chosen.
        additions: cache of layouts with one more machine.

    Raises:
        PlanInfeasible: the requested numbers of stages and members are impossible.
    """
    quickly = worth_searching(problems)
    choice = simple(problems, in_order=problems if problems[0].cost.num_machines <= MANY else quickly)
    for problem in _promising(problems, quickly, choice):
        choice.offer(proposed(problem, AutoPartitioning().search(problem)))
    if choice:
        seen: set[Layout] = set()
        _polish(problems, choice, additions, seen)
        _all_that_is_left(problems, choice)
        _polish(problems, choice, additions, seen)
    return choice


def simple(problems: Sequence[SearchProblem], *, in_order: Sequence[SearchProblem]) -> Choice:
    """Return the choice among the layouts of the other built-in strategies; empty if none was found.

    Args:
        problems: the job, once for each number of microbatches that may be chosen.
        in_order: problems for which dynamic programming is tried, too.
    """
    auto, choice = AutoPartitioning(), Choice()
    for problem in problems:
        choice.offer(proposed(problem, auto.simpler(problem, in_order=problem in in_order)))
    return choice


def proposed(problem: SearchProblem, candidates: Iterable[Candidate]) -> list[Proposal]:
    """Return the candidates that fit into memory and need no dead link, with their step time by the cost formula."""
    cost = problem.cost
    found = []
    for candidate in candidates:
        formula_s = cost.step_s(candidate.layout)
        if math.isfinite(formula_s) and cost.fits(candidate.layout):
            found.append(Proposal(cost, candidate, formula_s))
    return found


def _promising(
    problems: Sequence[SearchProblem], quickly: Sequence[SearchProblem], choice: Choice
) -> list[SearchProblem]:
    """Return the problems with the best layouts so far, at most as many as there are in ``quickly``.

    If no layout was found so far, return ``quickly``.
    """
    least: dict[int, float] = {}
    for proposal in choice.proposals:
        count = proposal.cost.workload.microbatches
        least[count] = min(least.get(count, math.inf), rounded(proposal.formula_s))
    if not least:
        return list(quickly)
    chosen = choice.best[0].cost.workload.microbatches
    order = sorted(least, key=lambda count: (count != chosen, least[count], count))[: len(quickly)]
    return [problem for problem in problems if problem.cost.workload.microbatches in order]


def _all_that_is_left(problems: Sequence[SearchProblem], choice: Choice) -> None:
    """Simulate the layouts from `all_below`, within the budgets, unless their lower bound rules them out.

    Problems with the lowest bounds on the step come first. Do nothing for more than `MOST_MACHINES` machines.
    """
    if problems[0].cost.num_machines > MOST_MACHINES:
        return
    left, cells = _MOST_EXAMINED, _CELLS
    bounds = [(lower_bound_s(problem.cost), place) for place, problem in enumerate(problems)]
    for bound_s, place in sorted(bounds):
        problem = problems[place]
        if bound_s >= choice.step_s or left <= 0 or cells <= 0:
            return
        layouts, examined = all_below(
            problem.cost,
            choice.step_s,
            stages=problem.stages,
            members_per_stage=problem.members_per_stage,
            budget=left,
        )
        before = choice.cells
        choice.offer(proposed(problem, map(Candidate, layouts)), most_cells=cells)
        left, cells = left - examined, cells - (choice.cells - before)


def _polish(
    problems: Sequence[SearchProblem], choice: Choice, additions: Additions, seen: set[Layout]
) -> None:
    """Simulate layouts near the best ones, within the limits `_PATIENCE` and `_CELLS`.

    Args:
        problems: the job, once for each number of microbatches.
        choice: the choice that new layouts are offered to.
        additions: cache of layouts with one more machine.
        seen: layouts whose neighbors were tried; this function adds to it.
    """
    until, patience = choice.cells + _CELLS, _PATIENCE
    while patience and choice.cells < until:
        proposal = next((each for each in choice.ranked if each.candidate.layout not in seen), None)
        if proposal is None:
            return
        layout, before_s = proposal.candidate.layout, choice.step_s
        seen.add(layout)
        problem = replace(problems[0], cost=proposal.cost)
        added = [
            each.layout
            for each in additions.of(problem, layout).values()
            if each is not None and each.step_s < before_s
        ]
        choice.offer(
            proposed(problem, map(Candidate, [*added, *nearby(problem, layout)])),
            most_cells=until - choice.cells,
        )
        patience = _PATIENCE if choice.step_s < before_s else patience - 1
