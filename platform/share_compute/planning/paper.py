"""Plans on paper, with all that people want to see around them: `share_compute.planning.report.dry_run` is the door."""

from __future__ import annotations

import math

from share_compute.errors import PlanInfeasible, ShareComputeError
from share_compute.planning.islands import propose_islands
from share_compute.planning.layout import Layout
from share_compute.planning.partitioning import Shard, strategy_names
from share_compute.planning.plan import NOT_MEASURED, IdleMachine, MemberPlan, Plan, PoolPlan, layer_span
from share_compute.planning.planner import Solution, solve
from share_compute.planning.profile import ModelProfile
from share_compute.planning.regions import complete
from share_compute.planning.report import (
    Alternative,
    IslandProposal,
    PlanReport,
    ServingPrediction,
    TimelineCell,
)
from share_compute.planning.serving import ServingCost, search_serving
from share_compute.planning.serving_bound import objective_s, serving_bound_s
from share_compute.planning.serving_explanation import ServingExplanation
from share_compute.planning.serving_infeasible import serving_infeasible
from share_compute.planning.strategies import is_measured, with_nominal_speeds
from share_compute.planning.words import bytes_text
from share_compute.planning.workload import ServingWorkload
from share_compute.specification import TrainJob
from share_compute.topology import Topology

_MOST_CELLS = 4096
"""A timeline with more of them is no picture any more."""


def report(
    spec: TrainJob,
    topology: Topology,
    profile: ModelProfile,
    *,
    strategy: str | None,
    compare: bool,
    serving: ServingWorkload | None,
) -> PlanReport:
    """Plan a job on paper; see `share_compute.planning.report.dry_run`."""
    served = _serve(spec, topology, profile, serving) if serving is not None else None
    try:
        solution = solve(_with_strategy(spec, strategy), topology, profile, 0, {})
    except PlanInfeasible:
        if served is None:
            raise
        return PlanReport(plan=served.plan, serving=served)
    return PlanReport(
        plan=solution.plan,
        timeline=_timeline(solution),
        alternatives=_alternatives(spec, topology, profile, solution) if compare else (),
        islands=_islands(solution),
        serving=served,
    )


def _with_strategy(spec: TrainJob, strategy: str | None) -> TrainJob:
    if strategy is None:
        return spec
    parallelism = spec.parallelism.model_copy(update={"strategy": strategy})
    return spec.model_copy(update={"parallelism": parallelism})


def _timeline(solution: Solution) -> tuple[TimelineCell, ...]:
    cells = solution.timeline.cells if solution.timeline is not None else ()
    if len(cells) > _MOST_CELLS:
        return ()
    return tuple(TimelineCell.model_validate(cell._asdict()) for cell in cells)


def _alternatives(
    spec: TrainJob, topology: Topology, profile: ModelProfile, chosen: Solution
) -> tuple[Alternative, ...]:
    """Return what every strategy makes of the job, the fastest first; those that find nothing come last."""
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
        pools=len(plan.pools),
        machines=sum(plan.pool_sizes),
    )


def _islands(solution: Solution) -> IslandProposal | None:
    prediction = solution.plan.prediction
    if prediction is None or len(set(solution.cost.network.region.tolist())) < 2:
        return None
    return propose_islands(solution.cost, lockstep_samples_per_s=prediction.samples_per_s)


def _serve(
    spec: TrainJob, topology: Topology, profile: ModelProfile, workload: ServingWorkload
) -> ServingPrediction:
    """Return the best placement for requests."""
    usable = with_nominal_speeds(topology)
    cost = ServingCost(profile, usable, complete(usable), workload)
    found = search_serving(cost, finalists=1)
    if not found:
        raise serving_infeasible(cost)
    best = found[0]
    bound_s = serving_bound_s(cost)
    exact = best.exact or objective_s(cost, best.layout) * (1 - 1e-9) <= bound_s
    measured = any(map(is_measured, topology.contributors))
    explanation = ServingExplanation(cost, best.layout, exact=exact, measured=measured)
    return ServingPrediction(
        objective=workload.objective,
        plan=_serving_plan(spec, topology, cost, best.layout, explanation),
        first_token_s=best.first_token_s,
        next_token_s=best.next_token_s,
        request_s=cost.request_s(best.layout),
        tokens_per_s=best.tokens_per_s,
        within_limits=best.within_limits,
        lower_bound_s=bound_s,
        bottleneck=explanation.bottleneck(),
        exact=exact,
        links_assumed=cost.network.assumed,
        speeds_assumed=not measured,
    )


def _serving_plan(
    spec: TrainJob, topology: Topology, cost: ServingCost, layout: Layout, explanation: ServingExplanation
) -> Plan:
    contributors = cost.topology.contributors
    pools = []
    for place, pool in enumerate(layout.pools):
        machine = contributors[pool.members[0]]
        need = math.ceil(float(cost.needed_bytes[pool.start, pool.stop]))
        standing = explanation.standing(place)
        filled = f"{bytes_text(need)} of {bytes_text(machine.memory_bytes)} used"
        member = MemberPlan(
            contributor_id=machine.id,
            name=machine.name,
            microbatches=(0,),
            memory_bytes=need,
            lent_bytes=machine.memory_bytes,
            busy_fraction=explanation.busy_fraction(place),
            reason=f"holds {layer_span(pool.start, pool.stop)}: {filled}, {standing}",
            standing=standing,
        )
        shard = Shard(spec.name, pool.start, pool.stop, cost.num_layers)
        pools.append(
            PoolPlan(
                start=pool.start,
                stop=pool.stop,
                parameters=cost.profile.parameters_of(shard),
                members=(member,),
            )
        )
    idle = [machine for machine in range(cost.num_machines) if machine not in set(layout.machines)]
    reasons = {contributors[machine].id: reason for machine, reason in explanation.why_out(idle).items()}
    used = {contributors[machine].id for machine in layout.machines}
    return Plan(
        epoch=0,
        model_id=spec.name,
        strategy="auto",
        num_layers=cost.num_layers,
        parameters=cost.profile.parameters,
        pools=tuple(pools),
        microbatches=1,
        idle=tuple(
            IdleMachine(
                contributor_id=machine.id,
                name=machine.name,
                reason=reasons.get(machine.id, NOT_MEASURED),
            )
            for machine in topology.contributors
            if machine.id not in used
        ),
    )
