"""Makes plans: asks the strategy for layouts, lets the event simulator choose among them, and says why.

`share_compute.planning.plan.make_plan` is the door to this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from share_compute.errors import UserError
from share_compute.planning.bound import lower_bound_s
from share_compute.planning.cost import Timings, TrainingCost
from share_compute.planning.explanation import Explanation
from share_compute.planning.infeasible import infeasible
from share_compute.planning.layout import Layout
from share_compute.planning.partitioning import Candidate, PartitioningStrategy, Shard, load_strategy
from share_compute.planning.plan import IdleMachine, MemberPlan, Plan, PoolPlan, Prediction
from share_compute.planning.problem import Problem
from share_compute.planning.profile import ModelProfile
from share_compute.planning.regions import complete
from share_compute.planning.schedule_simulator import StepTimeline, simulate_step
from share_compute.planning.strategies import (
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
"""Numbers of microbatches that are looked at when the job leaves it open."""
_SMALL = 8
"""With more machines, numbers are compared by a quick search, and only the best is searched in earnest."""


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
    """Return the numbers of microbatches to try: the job's own, or divisors of the batch, evenly spread."""
    training = spec.training
    if training.microbatches is not None:
        return [training.microbatches]
    least = min(spec.parallelism.members_per_pool or 1, training.batch_size)
    divisors = [number for number in _divisors(training.batch_size) if number >= least]
    if len(divisors) <= _MOST_CHOICES:
        return divisors
    spread = (len(divisors) - 1) / (_MOST_CHOICES - 1)
    return [divisors[round(place * spread)] for place in range(_MOST_CHOICES)]


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
    """Return the problems that deserve a search: all of a few machines, of many the one that a quick search prefers."""
    if (
        len(problems) == 1
        or problems[0].cost.num_machines <= _SMALL
        or not isinstance(strategy, SearchingStrategy)
    ):
        return problems
    quick = [
        (min((problem.cost.step_s(candidate.layout) for candidate in found), default=math.inf), problem)
        for problem in problems
        for found in [RecursivePartitioning().place(problem)]
    ]
    best_s, best = min(quick, key=lambda pair: (rounded(pair[0]), pair[1].cost.workload.microbatches))
    return [best] if math.isfinite(best_s) else problems


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
    """Simulate proposals as long as their formula, which no simulation undercuts, leaves them a chance."""
    best: tuple[float, int, int] | None = None
    chosen: tuple[_Proposal, StepTimeline] | None = None
    for proposal in proposals:
        if best is not None and rounded(proposal.formula_s) > best[0]:
            break
        timeline = simulate_step(proposal.cost, proposal.candidate.layout)
        rank = (rounded(timeline.step_s), *proposal.preference[1:])
        if best is None or rank < best:
            best, chosen = rank, (proposal, timeline)
    assert chosen is not None
    return chosen


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
    explanation = Explanation(
        cost,
        layout,
        timeline,
        asked=(problems[0].pools, problems[0].members_per_pool),
        strategy=spec.parallelism.strategy,
    )
    prediction = None
    if timeline is not None:
        searched = {id(proposal.cost) for proposal in proposals}
        exact = (
            len(searched) == len(problems)
            and chosen.candidate.exact
            and rounded(chosen.formula_s) <= rounded(proposals[0].formula_s)
        )
        prediction = _predict(
            cost,
            timeline,
            formula_s=chosen.formula_s,
            bound_s=min(lower_bound_s(problem.cost) for problem in problems),
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
                    busy_fraction=timeline.busy_fractions[machine] if timeline is not None else None,
                    reason=explanation.why_in(place, seat),
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
    for machine in topology.contributors:
        if machine.id not in place:
            yield _idle_machine(machine, "its speed was not measured, while that of others was")
        elif place[machine.id] not in used:
            yield _idle_machine(machine, reasons[place[machine.id]])


def _idle_machine(machine: Contributor, reason: str) -> IdleMachine:
    return IdleMachine(contributor_id=machine.id, name=machine.name, reason=reason)
