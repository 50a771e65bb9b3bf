"""What `auto` does beyond a search by the formula: it looks for the layout whose simulated step is shortest.

The formula bounds the simulation from below and is near it, but the layout that it likes best may be some percent
slower than another. So all that it cannot rule out is simulated, as far as the budgets reach:

1. What simpler strategies propose, at all numbers of microbatches: no plan is slower than one of theirs.
2. What the search finds at the numbers that look best.
3. Of up to `MOST_MACHINES` machines, of each set of them, the layouts that no other replaces and whose formula is below
   the best step so far.
4. Layouts near the best ones, and near those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from share_compute.planning.additions import Additions
from share_compute.planning.all_orders import MOST_MACHINES
from share_compute.planning.bound import lower_bound_s
from share_compute.planning.choice import Choice, Proposal, rounded
from share_compute.planning.counts import worth_searching
from share_compute.planning.layout import Layout
from share_compute.planning.limits import MANY
from share_compute.planning.nearby import nearby
from share_compute.planning.partitioning import Candidate
from share_compute.planning.problem import Problem
from share_compute.planning.search import all_below
from share_compute.planning.strategies import AutoPartitioning

_LOOKED_AT = 6_000_000
"""Candidates to look at for layouts that the formula does not rule out, over all numbers of microbatches."""
_CELLS = 1_000_000
"""Cells to lay out for them, and at most as many for layouts near the best; two seconds or three."""
_PATIENCE = 8
"""Layouts around which nothing faster is found, one after the other, before it stops looking."""


def thorough(problems: Sequence[Problem], additions: Additions) -> Choice:
    """Return the choice among all that `auto` can think of; empty when nothing fits.

    Args:
        problems: the job at each number of microbatches that may be chosen.
        additions: remembers what is tried with idle machines.

    Raises:
        PlanInfeasible: numbers alone forbid what was asked for.
    """
    auto, choice = AutoPartitioning(), Choice()
    quickly = worth_searching(problems)
    every = problems if problems[0].cost.num_machines <= MANY else quickly
    for problem in problems:
        choice.offer(proposed(problem, auto.simpler(problem, in_order=problem in every)))
    for problem in _promising(problems, quickly, choice):
        choice.offer(proposed(problem, auto.search(problem)))
    if choice:
        seen: set[Layout] = set()
        _polish(problems, choice, additions, seen)
        _all_that_is_left(problems, choice)
        _polish(problems, choice, additions, seen)
    return choice


def proposed(problem: Problem, candidates: Iterable[Candidate]) -> list[Proposal]:
    """Return the candidates that fit and that links can serve, with what they take by the formula."""
    cost = problem.cost
    found = []
    for candidate in candidates:
        formula_s = cost.step_s(candidate.layout)
        if math.isfinite(formula_s) and cost.fits(candidate.layout):
            found.append(Proposal(cost, candidate, formula_s))
    return found


def _promising(problems: Sequence[Problem], quickly: Sequence[Problem], choice: Choice) -> list[Problem]:
    """Return as many problems as a quick look finds worth a search: those with the best layout so far."""
    least: dict[int, float] = {}
    for proposal in choice.proposals:
        count = proposal.cost.workload.microbatches
        least[count] = min(least.get(count, math.inf), rounded(proposal.formula_s))
    if not least:
        return list(quickly)
    chosen = choice.best[0].cost.workload.microbatches
    order = sorted(least, key=lambda count: (count != chosen, least[count], count))[: len(quickly)]
    return [problem for problem in problems if problem.cost.workload.microbatches in order]


def _all_that_is_left(problems: Sequence[Problem], choice: Choice) -> None:
    """Simulate what the formula does not rule out; the numbers of microbatches that promise most first."""
    if problems[0].cost.num_machines > MOST_MACHINES:
        return
    left, cells = _LOOKED_AT, _CELLS
    bounds = [(lower_bound_s(problem.cost), place) for place, problem in enumerate(problems)]
    for bound_s, place in sorted(bounds):
        problem = problems[place]
        if bound_s >= choice.step_s or left <= 0 or cells <= 0:
            return
        layouts, looked_at = all_below(
            problem.cost,
            choice.step_s,
            pools=problem.pools,
            members_per_pool=problem.members_per_pool,
            budget=left,
        )
        before = choice.cells
        choice.offer(proposed(problem, map(Candidate, layouts)), most_cells=cells)
        left, cells = left - looked_at, cells - (choice.cells - before)


def _polish(problems: Sequence[Problem], choice: Choice, additions: Additions, seen: set[Layout]) -> None:
    """Look around the best layouts, from one after the other, until several have none near them that is faster.

    Args:
        problems: the job.
        choice: takes what is found.
        additions: of idle machines.
        seen: layouts that were looked around; grows.
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
