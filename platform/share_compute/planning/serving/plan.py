"""Plans of deployments: the machines that serve a model, with predicted times and reasons."""

from __future__ import annotations

import math

from share_compute.models.profiles.profile import ModelProfile
from share_compute.planning.cost.layout import Layout
from share_compute.planning.network.regions import complete
from share_compute.planning.plan import NOT_MEASURED, IdleMachine, MemberPlan, Plan, StagePlan, layer_span
from share_compute.planning.report import ServingPrediction
from share_compute.planning.search.strategies import is_measured, with_nominal_speeds
from share_compute.planning.serving.bound import objective_s, serving_bound_s
from share_compute.planning.serving.cost import ServingCost
from share_compute.planning.serving.explanation import ServingExplanation
from share_compute.planning.serving.infeasible import serving_infeasible
from share_compute.planning.serving.search import search_serving
from share_compute.quantities import bytes_text
from share_compute.shards import Shard
from share_compute.specification.workload import ServingWorkload
from share_compute.topology import Topology


def plan_serving(
    name: str,
    topology: Topology,
    profile: ModelProfile,
    workload: ServingWorkload,
    *,
    stages: int | None = None,
    epoch: int = 0,
) -> ServingPrediction:
    """Return the best placement found for these requests, with predicted times and reasons.

    Args:
        name: name of the model.
        topology: the machines that may be used, and the links between them.
        profile: cost profile of the model.
        workload: the requests.
        stages: required number of stages, one machine each; None leaves it to the search.
        epoch: epoch that is copied into the plan.

    Raises:
        PlanInfeasible: no placement was found, or several stages are requested and the model cannot be cut.
    """
    stages = profile.require_stages(stages)
    usable = with_nominal_speeds(topology.with_ranks(workload.ranks))
    cost = ServingCost(profile, usable, complete(usable), workload)
    found = search_serving(cost, finalists=1, stages=stages)
    if not found:
        raise serving_infeasible(cost, stages)
    best = found[0]
    bound_s = serving_bound_s(cost)
    exact = best.exact or objective_s(cost, best.layout) * (1 - 1e-9) <= bound_s
    measured = any(map(is_measured, topology.contributors))
    explanation = ServingExplanation(cost, best.layout, exact=exact, measured=measured)
    return ServingPrediction(
        objective=workload.objective,
        plan=_plan(name, epoch, topology, cost, best.layout, explanation),
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


def _plan(
    name: str,
    epoch: int,
    topology: Topology,
    cost: ServingCost,
    layout: Layout,
    explanation: ServingExplanation,
) -> Plan:
    contributors = cost.topology.contributors
    stages = []
    for place, stage in enumerate(layout.stages):
        machine = contributors[stage.members[0]]
        need = math.ceil(float(cost.needed_bytes[stage.start, stage.stop]))
        standing = explanation.standing(place)
        filled = f"{bytes_text(need)} of {bytes_text(machine.memory_bytes)} used"
        member = MemberPlan(
            contributor_id=machine.id,
            name=machine.name,
            microbatches=(0,),
            memory_bytes=need,
            lent_bytes=machine.memory_bytes,
            busy_fraction=explanation.busy_fraction(place),
            reason=f"holds {layer_span(stage.start, stage.stop)}: {filled}, {standing}",
            standing=standing,
        )
        shard = Shard(name, stage.start, stage.stop, cost.num_layers)
        stages.append(
            StagePlan(
                start=stage.start,
                stop=stage.stop,
                parameters=cost.profile.parameters_of(shard),
                members=(member,),
            )
        )
    idle = [machine for machine in range(cost.num_machines) if machine not in set(layout.machines)]
    reasons = {contributors[machine].id: reason for machine, reason in explanation.why_out(idle).items()}
    used = {contributors[machine].id for machine in layout.machines}
    return Plan(
        epoch=epoch,
        model_id=name,
        strategy="auto",
        num_layers=cost.num_layers,
        parameters=cost.profile.parameters,
        stages=tuple(stages),
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
