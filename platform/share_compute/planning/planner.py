"""Makes plans: asks the strategy for layouts, lets the event simulator choose among them, and says why.

`share_compute.planning.plan.make_plan` is the door to this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from share_compute.errors import UserError
from share_compute.planning.additions import best_with, worth_trying
from share_compute.planning.bound import lower_bound_s
from share_compute.planning.cost import Timings, TrainingCost
from share_compute.planning.explanation import Explanation
from share_compute.planning.infeasible import infeasible
from share_compute.planning.layout import Layout, solo
from share_compute.planning.partitioning import Candidate, PartitioningStrategy, Shard, load_strategy
from share_compute.planning.plan import NOT_MEASURED, IdleMachine, MemberPlan, Plan, PoolPlan, Prediction
from share_compute.planning.problem import Problem
from share_compute.planning.profile import ModelProfile
from share_compute.planning.regions import complete
from share_compute.planning.schedule_simulator import StepTimeline, simulate_step
from share_compute.planning.strategies import (
    AutoPartitioning,
    RecursivePartitioning,
    SearchingStrategy,
    is_measured,
    with_nominal_speeds,
)
from share_compute.planning.workload import TrainingWorkload
from share_compute.specification import TrainJob
from share_compute.topology import Contributor, Topology
from share_compute.training.schedule import blocks

_MOST_CHOICES = 6
"""Numbers of microbatches that are searched in earnest when the job leaves it open."""
_SMALL = 8
"""With more machines, only the number that a quick search prefers is."""
_MOST_ADDED = 8
"""Idle machines that are taken in after the search."""
_NOTICEABLE = 0.999


@dataclass(frozen=True, slots=True)
class Solution:
    """A plan with what it was made from."""

    plan: Plan
    cost: TrainingCost
    """Of the machines that could be used, at the plan's number of microbatches."""
    layout: Layout
    """The same as the plan, by index into ``cost.topology``."""
    timeline: StepTimeline | None
    """One step as the simulator laid it; None where no machine's speed was measured."""


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A layout at one number of microbatches."""

    cost: TrainingCost
    candidate: Candidate
    formula_s: float

    @property
    def preference(self) -> tuple[float, int, int]:
        """Sorts the fastest first; of equals, the one with fewer machines and larger microbatches."""
        return (
            rounded(self.formula_s),
            len(self.candidate.layout.machines),
            self.cost.workload.microbatches,
        )


def solve(
    spec: TrainJob, topology: Topology, profile: ModelProfile, epoch: int, timings: Timings
) -> Solution:
    """Make a plan; see `share_compute.planning.plan.make_plan`."""
    if profile.parameters == 0:
        raise UserError("the model has no parameters to train", mend="add a layer that has some, e.g. linear")
    measured = any(map(is_measured, topology.contributors))
    usable = with_nominal_speeds(topology)
    strategy = load_strategy(spec.parallelism.strategy)
    network = complete(usable)
    problems = [
        Problem(
            TrainingCost(profile, usable, network, workload(spec, microbatches), timings),
            pools=_pools(spec, usable, profile, measured=measured),
            members_per_pool=spec.parallelism.members_per_pool or (None if measured else 1),
        )
        for microbatches in microbatch_choices(spec)
    ]
    proposals = _proposals(strategy, _worth_searching(strategy, problems))
    chosen, timeline = _fastest(proposals) if measured else (proposals[0], None)
    if timeline is not None and isinstance(strategy, AutoPartitioning):
        chosen, timeline = _with_idle_machines(problems[0], chosen, timeline)
    if timeline is not None and math.isinf(timeline.step_s):
        raise infeasible(strategy, problems[-1], chosen.candidate.layout)
    return _finish(spec, topology, epoch, problems, proposals, chosen, timeline)


def workload(spec: TrainJob, microbatches: int) -> TrainingWorkload:
    """Return what the cost model must know of a job."""
    training = spec.training
    return TrainingWorkload(
        batch_size=training.batch_size,
        microbatches=microbatches,
        sequence_length=1 if spec.model.layers is not None else training.sequence_length,
        optimizer_tensors=training.optimizer.name.state_tensors,
    )


def microbatch_choices(spec: TrainJob) -> list[int]:
    """Return the numbers of microbatches that may be chosen: the job's own, or all divisors of the batch."""
    training = spec.training
    if training.microbatches is not None:
        return [training.microbatches]
    least = min(spec.parallelism.members_per_pool or 1, training.batch_size)
    return [number for number in _divisors(training.batch_size) if number >= least]


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _pools(spec: TrainJob, usable: Topology, profile: ModelProfile, *, measured: bool) -> int | None:
    """Return how many pools there must be: as asked; all machines take part when none of them was measured."""
    asked = spec.parallelism.pools
    if asked is not None or measured:
        return asked
    size = spec.parallelism.members_per_pool or 1
    return max(1, min(len(usable.contributors) // size, len(profile.layers)))


def _worth_searching(strategy: PartitioningStrategy, problems: list[Problem]) -> list[Problem]:
    """Return the problems that deserve a search: all of a few, else those that a quick search prefers."""
    most = _MOST_CHOICES if problems[0].cost.num_machines <= _SMALL else 1
    if len(problems) <= most or not isinstance(strategy, SearchingStrategy):
        return problems
    quick_s = [_quick_s(problem) for problem in problems]
    order = sorted(range(len(problems)), key=lambda place: (rounded(quick_s[place]), place))
    able = [place for place in order if math.isfinite(quick_s[place])]
    if not able:
        spread = (len(problems) - 1) / (_MOST_CHOICES - 1)
        able = [round(place * spread) for place in range(_MOST_CHOICES)]
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


def _proposals(strategy: PartitioningStrategy, problems: list[Problem]) -> list[_Proposal]:
    """Return all layouts that fit and that links can serve, best by the formula first."""
    found: list[_Proposal] = []
    tried: list[Layout] = []
    for problem in problems:
        for candidate in strategy.place(problem):
            tried.append(candidate.layout)
            formula_s = problem.cost.step_s(candidate.layout)
            if math.isfinite(formula_s) and problem.cost.fits(candidate.layout):
                found.append(_Proposal(problem.cost, candidate, formula_s))
    if not found:
        # The last one has the smallest microbatches, so it needs the least memory.
        raise infeasible(strategy, problems[-1], tried[-1] if tried else None)
    return sorted(found, key=lambda proposal: proposal.preference)


def _fastest(proposals: list[_Proposal]) -> tuple[_Proposal, StepTimeline]:
    """Simulate all proposals: the formula is near the simulation, not below it and not in the same order."""
    ranked = [
        ((rounded(timeline.step_s), *proposal.preference[1:]), place, timeline)
        for place, proposal in enumerate(proposals)
        for timeline in [simulate_step(proposal.cost, proposal.candidate.layout)]
    ]
    _, place, timeline = min(ranked, key=lambda each: each[:2])
    return proposals[place], timeline


def _with_idle_machines(
    asked: Problem, chosen: _Proposal, timeline: StepTimeline
) -> tuple[_Proposal, StepTimeline]:
    """Take in machines that the simulation, unlike the formula, finds a use for."""
    cost = chosen.cost
    problem = Problem(cost, asked.pools, asked.members_per_pool)
    for _ in range(_MOST_ADDED):
        layout = chosen.candidate.layout
        grown = [best_with(problem, layout, machine) for machine in worth_trying(cost, layout)]
        tried = [(simulate_step(cost, each), each) for each in grown if each is not None]
        better = min(tried, key=lambda each: (rounded(each[0].step_s), each[1]), default=None)
        if better is None or better[0].step_s >= _NOTICEABLE * timeline.step_s:
            break
        timeline, layout = better
        chosen = _Proposal(cost, Candidate(layout), cost.step_s(layout))
    return chosen, timeline


def rounded(seconds: float) -> float:
    """Return seconds to nine digits, so that the last bits of a sum decide nothing."""
    return float(f"{seconds:.9e}")


def _finish(
    spec: TrainJob,
    topology: Topology,
    epoch: int,
    problems: list[Problem],
    proposals: list[_Proposal],
    chosen: _Proposal,
    timeline: StepTimeline | None,
) -> Solution:
    cost, layout = chosen.cost, chosen.candidate.layout
    bounds_s = [lower_bound_s(problem.cost) for problem in problems]
    proved = {id(proposal.cost) for proposal in proposals if proposal.candidate.exact}
    exact = (
        chosen.candidate.exact
        and rounded(chosen.formula_s) <= rounded(proposals[0].formula_s)
        and all(
            id(problem.cost) in proved or bound_s >= chosen.formula_s
            for problem, bound_s in zip(problems, bounds_s, strict=True)
        )
    )
    explanation = Explanation(
        cost,
        layout,
        timeline,
        asked=(problems[0].pools, problems[0].members_per_pool),
        strategy=spec.parallelism.strategy,
        exact=exact,
    )
    prediction = None
    if timeline is not None:
        prediction = _predict(
            cost,
            timeline,
            formula_s=chosen.formula_s,
            bound_s=min(bounds_s),
            exact=exact,
            explanation=explanation,
        )
    plan = Plan(
        epoch=epoch,
        model_id=spec.name,
        strategy=spec.parallelism.strategy,
        num_layers=cost.num_layers,
        parameters=cost.profile.parameters,
        pools=tuple(_pool_plans(spec, cost, layout, timeline, explanation)),
        microbatches=cost.workload.microbatches,
        idle=tuple(_idle(topology, cost, layout, explanation)),
        prediction=prediction,
    )
    return Solution(plan, cost, layout, timeline)


def _predict(
    cost: TrainingCost,
    timeline: StepTimeline,
    *,
    formula_s: float,
    bound_s: float,
    exact: bool,
    explanation: Explanation,
) -> Prediction:
    samples_per_s = cost.workload.batch_size / timeline.step_s
    return Prediction(
        step_s=timeline.step_s,
        formula_s=formula_s,
        lower_bound_s=bound_s,
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * cost.workload.sequence_length,
        bottleneck=explanation.bottleneck(),
        exact=exact,
        links_assumed=cost.network.assumed,
    )


def _pool_plans(
    spec: TrainJob,
    cost: TrainingCost,
    layout: Layout,
    timeline: StepTimeline | None,
    explanation: Explanation,
) -> Iterable[PoolPlan]:
    for place, pool in enumerate(layout.pools):
        members = []
        for seat, (machine, owned) in enumerate(zip(pool.members, blocks(pool.shares), strict=True)):
            contributor = cost.topology.contributors[machine]
            members.append(
                MemberPlan(
                    contributor_id=contributor.id,
                    name=contributor.name,
                    microbatches=owned,
                    memory_bytes=math.ceil(cost.member_bytes(layout, place, seat)),
                    lent_bytes=contributor.memory_bytes,
                    busy_fraction=timeline.busy_fractions[machine] if timeline is not None else None,
                    reason=explanation.why_in(place, seat),
                    standing=explanation.standing(place, seat),
                )
            )
        shard = Shard(spec.name, pool.start, pool.stop, cost.num_layers)
        yield PoolPlan(
            start=pool.start,
            stop=pool.stop,
            parameters=cost.profile.parameters_of(shard),
            members=tuple(members),
        )


def _idle(
    topology: Topology, cost: TrainingCost, layout: Layout, explanation: Explanation
) -> Iterable[IdleMachine]:
    place = {machine.id: index for index, machine in enumerate(cost.topology.contributors)}
    used = set(layout.machines)
    reasons = explanation.why_out([index for index in place.values() if index not in used])
    for index, reason in reasons.items():
        yield _idle_machine(cost.topology.contributors[index], reason)
    for machine in topology.contributors:
        if machine.id not in place:
            yield _idle_machine(machine, NOT_MEASURED)


def _idle_machine(machine: Contributor, reason: str) -> IdleMachine:
    return IdleMachine(contributor_id=machine.id, name=machine.name, reason=reason)
