"""Dry runs: plan a job without running it. `lay_out` simulates a step of an existing plan."""

from __future__ import annotations

import math
from collections.abc import Mapping

from share_compute.errors import PlanInfeasible, ShareComputeError
from share_compute.models.profiles.profile import ModelProfile
from share_compute.planning.choice import choose_policy, in_rounds, with_choice
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.cost.schedule_simulator import simulate_step
from share_compute.planning.cost.timings import MachineTimings, holding
from share_compute.planning.islands import propose_islands
from share_compute.planning.network.regions import complete
from share_compute.planning.plan import IdleMachine, Plan
from share_compute.planning.planner import Solution, solve, workload
from share_compute.planning.policies import compare_policies
from share_compute.planning.report import (
    Alternative,
    IslandProposal,
    PlanReport,
    PlanTimeline,
    PolicyChoice,
    PolicyFigures,
    ServingPrediction,
    TimelineCell,
    TimelineTransfer,
    TimelineUpdate,
    unpredictable,
)
from share_compute.planning.rounds import plan_rounds
from share_compute.planning.search.partitioning import strategy_names
from share_compute.planning.search.strategies import with_nominal_speeds
from share_compute.planning.serving.plan import plan_serving
from share_compute.specification import TrainJob
from share_compute.specification.placement.selection import SelectionSpec
from share_compute.specification.serve import ServingParallelismSpec
from share_compute.specification.synchronization import AutoSpec
from share_compute.specification.workload import ServingWorkload
from share_compute.topology import Topology

_MOST_CELLS = 4096
"""Maximum number of cells in a timeline. Larger timelines are left out, because they cannot be displayed."""


def dry_run(
    spec: TrainJob,
    topology: Topology,
    profile: ModelProfile,
    *,
    strategy: str | None = None,
    compare: bool = False,
    serving: ServingWorkload | None = None,
) -> PlanReport:
    """Plan a job without running it.

    Args:
        spec: the job.
        topology: the machines, real or hypothetical.
        profile: cost profile of the job's model.
        strategy: strategy that replaces the job's own, and its pinned plan; None keeps the job's.
        compare: whether to report the plan of every installed strategy, and policies of synchronization.
        serving: requests for which serving is predicted; None skips this prediction.

    Raises:
        PlanInfeasible: without ``serving``, the machines cannot train the model; with ``serving``, they cannot serve
            these requests. Also if the job may use none of the machines.
        UserError: the model has no parameters, there is no such strategy, or its partitions are invalid.
    """
    served = None if serving is None else _served(spec, topology, profile, serving)
    try:
        usable, left_out = selected(spec.parallelism, topology)
        report = _trained(_with_strategy(spec, strategy), usable, profile, compare=compare)
    except PlanInfeasible:
        if served is None:
            raise
        return PlanReport(plan=served.plan, serving=served)
    return report.with_idle(left_out).model_copy(update={"serving": served})


def _served(
    spec: TrainJob, topology: Topology, profile: ModelProfile, serving: ServingWorkload
) -> ServingPrediction:
    """Return how the machines that a deployment of the model may use serve it. Ranks may be on GPUs then."""
    given = spec.parallelism
    selection = ServingParallelismSpec(only=given.only, avoid=given.avoid, tensor=serving.ranks)
    usable, left_out = selected(selection, topology)
    served = plan_serving(spec.name, usable, profile, serving)
    return served.model_copy(update={"plan": served.plan.with_idle(left_out)})


def _trained(spec: TrainJob, topology: Topology, profile: ModelProfile, *, compare: bool) -> PlanReport:
    rounds, every, given = None, topology, spec
    choice = choose_policy(spec, topology, profile)
    spec = with_choice(spec, choice)
    if spec.training.rounds is not None:
        solution, rounds, topology = plan_rounds(spec, topology, profile)
    else:
        solution = solve(spec, topology, profile, 0, {})
    return PlanReport(
        plan=solution.plan,
        timeline=_timeline(solution),
        alternatives=_alternatives(spec, topology, profile, solution) if compare else (),
        policies=_policies(given, choice, every, profile) if compare else (),
        islands=None if rounds is not None or choice is not None else _islands(solution),
        rounds=rounds,
        choice=choice,
    )


def selected(selection: SelectionSpec, topology: Topology) -> tuple[Topology, tuple[IdleMachine, ...]]:
    """Return the topology of the machines that the job may use, and the excluded machines with the reasons.

    Raises:
        PlanInfeasible: the job may use none of the machines.
    """
    left_out = tuple(
        IdleMachine(contributor_id=machine.id, name=machine.name, reason=why)
        for machine in topology.contributors
        if (why := selection.why_not(machine)) is not None
    )
    if not left_out:
        return topology, ()
    if len(left_out) == len(topology.contributors):
        raise PlanInfeasible(
            f"the job may use none of the {len(left_out)} machines: it waits for {selection.words}",
            hint="change parallelism.only, avoid and tensor, or let such a machine join",
        )
    return topology.without({machine.contributor_id for machine in left_out}), left_out


def lay_out(
    spec: TrainJob,
    plan: Plan,
    topology: Topology,
    profile: ModelProfile,
    timings: Mapping[str, MachineTimings],
) -> PlanTimeline:
    """Simulate one step of an existing plan. If that is impossible, ``problem`` of the result says why.

    Args:
        spec: the job.
        plan: the existing plan.
        topology: the machines of the plan, possibly among others.
        profile: cost profile of the job's model.
        timings: timings of the job's layers by contributor id; `holding` selects the valid ones.
    """
    problem = unpredictable(plan, topology)
    if problem is not None:
        return PlanTimeline(problem=problem)
    if isinstance(spec.training.synchronization, AutoSpec) and not plan.branches:
        spec = with_choice(spec, PolicyChoice(every=None))
    usable = with_nominal_speeds(topology.with_ranks(spec.parallelism.tensor, is_training=True))
    known = holding(timings, usable, spec.training.batch_size // plan.microbatches)
    work = workload(spec.with_boundaries(plan.boundaries), plan.microbatches)
    cost = TrainingCost(profile, usable, complete(usable), work, known)
    index = {machine.id: place for place, machine in enumerate(usable.contributors)}
    # Members without microbatches are left out: the simulation needs at least one microbatch for each member.
    members_of = [
        [place for place, member in enumerate(stage.members) if member.microbatches] for stage in plan.stages
    ]
    layout = Layout(
        tuple(
            StageLayout(
                stage.start,
                stage.stop,
                tuple(index[stage.members[place].contributor_id] for place in places),
                tuple(len(stage.members[place].microbatches) for place in places),
            )
            for stage, places in zip(plan.stages, members_of, strict=True)
        )
    )
    step = simulate_step(cost, layout, with_transfers=True)
    if math.isinf(step.step_s):
        return PlanTimeline(problem="a link of this plan carries nothing, as it was measured last")
    if len(step.cells) > _MOST_CELLS:
        return PlanTimeline(step_s=step.step_s, cell_count=len(step.cells))
    return PlanTimeline(
        step_s=step.step_s,
        cell_count=len(step.cells),
        cells=tuple(
            TimelineCell.model_validate({**cell._asdict(), "member": members_of[cell.stage][cell.member]})
            for cell in step.cells
        ),
        transfers=tuple(
            TimelineTransfer(
                microbatch=sent.microbatch,
                kind=sent.kind,
                source=(sent.source[0], members_of[sent.source[0]][sent.source[1]]),
                target=(sent.target[0], members_of[sent.target[0]][sent.target[1]]),
                start_s=sent.start_s,
                stop_s=sent.stop_s,
            )
            for sent in step.transfers
        ),
        updates=tuple(
            TimelineUpdate(stage=place, member=members_of[place][index], start_s=start_s, stop_s=stop_s)
            for place, stage in enumerate(layout.stages)
            for index, machine in enumerate(stage.members)
            for start_s, stop_s in [step.updates[machine]]
        ),
    )


def _policies(
    spec: TrainJob, choice: PolicyChoice | None, topology: Topology, profile: ModelProfile
) -> tuple[PolicyFigures, ...]:
    """Return the figures of all policies; with ``auto``, the job's own policy is the chosen one."""
    if choice is None:
        return compare_policies(spec, topology, profile)
    rows = compare_policies(in_rounds(spec, choice.every), topology, profile)
    if choice.every is not None:
        return rows
    return tuple(row.model_copy(update={"is_own": row.policy == "lockstep"}) for row in rows)


def _with_strategy(spec: TrainJob, strategy: str | None) -> TrainJob:
    if strategy is None:
        return spec
    parallelism = spec.parallelism.model_copy(update={"strategy": strategy, "plan": None})
    return spec.model_copy(update={"parallelism": parallelism})


def _timeline(solution: Solution) -> tuple[TimelineCell, ...]:
    cells = solution.timeline.cells if solution.timeline is not None else ()
    if len(cells) > _MOST_CELLS:
        return ()
    return tuple(TimelineCell.model_validate(cell._asdict()) for cell in cells)


def _alternatives(
    spec: TrainJob, topology: Topology, profile: ModelProfile, chosen: Solution
) -> tuple[Alternative, ...]:
    """Return the figures of every strategy's plan: the fastest first, and plans without a predicted step last."""
    found = []
    for name in strategy_names():
        if name == chosen.plan.strategy:
            found.append(_summary(chosen.plan))
            continue
        try:
            found.append(_summary(solve(_with_strategy(spec, name), topology, profile, 0, {}).plan))
        except ShareComputeError as failure:
            found.append(Alternative(strategy=name, problem=failure.message))
    return tuple(
        sorted(found, key=lambda one: (math.inf if one.step_s is None else one.step_s, one.strategy))
    )


def _summary(plan: Plan) -> Alternative:
    return Alternative(
        strategy=plan.strategy,
        step_s=plan.prediction.step_s if plan.prediction is not None else None,
        samples_per_s=plan.prediction.samples_per_s if plan.prediction is not None else None,
        stages=len(plan.stages),
        machines=sum(plan.stage_sizes),
    )


def _islands(solution: Solution) -> IslandProposal | None:
    prediction = solution.plan.prediction
    if prediction is None or len(set(solution.cost.network.region.tolist())) < 2:
        return None
    return propose_islands(solution.cost, lockstep_samples_per_s=prediction.samples_per_s)
