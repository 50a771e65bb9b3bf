"""Pure functions that derive the membership of an epoch from a plan, and from the previous epoch."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from share_compute.errors import ContributorLost
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.cost.schedule_simulator import simulate_step
from share_compute.planning.plan import Plan, StagePlan
from share_compute.planning.planner import Solution
from share_compute.planning.sum_plans import sum_plan
from share_compute.protocol.coordinator import PlanMembership
from share_compute.protocol.membership import Membership, Worker, fresh
from share_compute.protocol.messages import Form, Report
from share_compute.protocol.recovery import recover
from share_compute.protocol.schedule import blocks, even_shares
from share_compute.quantities import listed
from share_compute.topology import Topology
from share_compute.training.shares import WHOLE, OptimizerShare

Shares = Mapping[int, Sequence[int]]
"""Number of microbatches that each member of a stage computes, by index of the stage."""


def first_form(
    plan: Plan, request: PlanMembership, *, is_tied: bool, shares_optimizer: bool = False, slices: int = 1
) -> Form:
    """Return the first epoch of a plan, which starts the open step from the beginning."""
    owners = owners_of(plan)
    membership = Membership(
        epoch=request.epoch,
        shards=shards_of(plan),
        stages=stages_of(plan),
        owners=owners,
        step=request.committed + 1,
        tasks=fresh(owners),
        is_tied=is_tied,
        shares_optimizer=shares_optimizer,
        slices=slices,
    )
    return Form(membership, keeps_step=False)


def next_form(
    membership: Membership,
    request: PlanMembership,
    cost: TrainingCost,
    leaving: Container[Worker] = (),
    shares: Shares | None = None,
) -> Form:
    """Return the next epoch: the same shards, the remaining members and, if given, new shares of microbatches.

    Args:
        membership: membership of the previous epoch.
        request: the request for the epoch, with the members' reports.
        cost: cost model with the members' speeds.
        leaving: members to leave out.
        shares: new shares of microbatches, by stage; applied only to stages whose members all stay.

    Raises:
        ContributorLost: a stage has no member left.
    """
    stages = tuple(
        tuple(worker for worker in stage if worker in request.reports and worker not in leaving)
        for stage in membership.stages
    )
    if not all(stages):
        left = frozenset(worker for stage in stages for worker in stage)
        raise machines_lost(cost.topology, [worker for worker in membership.workers if worker not in left])
    owners = []
    for place, stage in enumerate(stages):
        if len(stage) < len(membership.stages[place]):
            owners.append(shared(stage, membership.shards[place], cost))
        elif shares is not None and place in shares:
            owners.append(dealt(stage, shares[place]))
        else:
            owners.append(membership.owners[place])
    return recovered(
        membership.shards,
        stages,
        owners,
        request,
        request.reports,
        is_tied=membership.is_tied,
        shares_optimizer=membership.shares_optimizer,
        slices=membership.slices,
    )


def moved_form(
    before: Membership | None,
    plan: Plan,
    request: PlanMembership,
    moved: Container[Worker],
    *,
    is_tied: bool,
    shares_optimizer: bool = False,
    slices: int = 1,
) -> Form:
    """Return the first epoch of a new plan, whose members have loaded their shards.

    If no layer range changes, results of the open step are kept, except those of the members in ``moved``.

    Args:
        before: membership of the previous epoch; None if there is none.
        plan: the new plan.
        request: the request for the epoch, with the members' reports.
        moved: members that have loaded a shard for this epoch, and thereby lost their results of the open step.
        is_tied: whether the first and the last stage share a parameter.
        shares_optimizer: whether each member of a stage keeps a share of the optimizer's state.
        slices: number of slices of each sequence.
    """
    if before is None or before.shards != shards_of(plan):
        return first_form(plan, request, is_tied=is_tied, shares_optimizer=shares_optimizer, slices=slices)
    reports = {worker: report for worker, report in request.reports.items() if worker not in moved}
    return recovered(
        before.shards,
        stages_of(plan),
        owners_of(plan),
        request,
        reports,
        is_tied=is_tied,
        shares_optimizer=shares_optimizer,
        slices=slices,
    )


def recovered(
    shards: tuple[tuple[int, int], ...],
    stages: tuple[tuple[Worker, ...], ...],
    owners: Sequence[tuple[Worker, ...]],
    request: PlanMembership,
    reports: Mapping[Worker, Report],
    *,
    is_tied: bool,
    shares_optimizer: bool = False,
    slices: int = 1,
) -> Form:
    """Return an epoch that continues the open step from the results that members have reported."""
    step = request.committed + 1
    recovery = recover(stages, owners, reports, step, shares_optimizer=shares_optimizer, slices=slices)
    return Form(
        Membership(
            epoch=request.epoch,
            shards=shards,
            stages=stages,
            owners=tuple(owners),
            step=step,
            tasks=recovery.tasks,
            resends=recovery.resends,
            reduced=recovery.reduced,
            forgets=recovery.forgets,
            is_tied=is_tied,
            shares_optimizer=shares_optimizer,
            slices=slices,
        )
    )


def machines_lost(topology: Topology, workers: Iterable[Worker]) -> ContributorLost:
    """Return the error for lost machines without which the attempt cannot continue.

    Args:
        topology: machines of the job, for their names.
        workers: ids of the lost machines.
    """
    known = {machine.id: machine.name for machine in topology.contributors}
    names = listed(sorted(known.get(worker, worker) for worker in workers))
    return ContributorLost(
        f"machines were lost: {names}",
        machine=names,
        hint="resume the job to continue from its last checkpoint on the available machines",
    )


# -- layers and microbatches -------------------------------------------------------------------------------------------


def shards_of(plan: Plan) -> tuple[tuple[int, int], ...]:
    """Return the layers [start, stop) of each stage."""
    return tuple((stage.start, stage.stop) for stage in plan.stages)


def stages_of(plan: Plan) -> tuple[tuple[Worker, ...], ...]:
    """Return the members of each stage."""
    return tuple(tuple(member.contributor_id for member in stage.members) for stage in plan.stages)


def shares_of(plan: Plan, *, shares_optimizer: bool) -> dict[Worker, OptimizerShare]:
    """Return the share of the optimizer's state that each member keeps."""
    return {
        worker: OptimizerShare(index, len(stage)) if shares_optimizer else WHOLE
        for stage in stages_of(plan)
        for index, worker in enumerate(stage)
    }


def owners_of(plan: Plan) -> tuple[tuple[Worker, ...], ...]:
    """Return, by stage and microbatch id, the member that computes the microbatch."""
    return tuple(_owners(stage) for stage in plan.stages)


def _owners(stage: StagePlan) -> tuple[Worker, ...]:
    found = {
        microbatch: member.contributor_id for member in stage.members for microbatch in member.microbatches
    }
    return tuple(found[microbatch] for microbatch in sorted(found))


def dealt(stage: Sequence[Worker], shares: Sequence[int]) -> tuple[Worker, ...]:
    """Return, for each microbatch id in order, the member that computes it.

    Member ``i`` of ``stage`` gets a contiguous block of ``shares[i]`` microbatches.
    """
    return tuple(worker for worker, block in zip(stage, blocks(shares), strict=True) for _ in block)


def shared(stage: Sequence[Worker], shard: tuple[int, int], cost: TrainingCost) -> tuple[Worker, ...]:
    """Return, for each microbatch id in order, the member of a stage that computes it.

    The shares minimize the predicted time until the last member finishes. Even shares are used instead if the
    cost model lacks a member or its speed, or if a member would get no microbatch. Even shares leave the last
    members without a microbatch only if there are fewer microbatches than members. With slices of sequences, each
    member gets all microbatches of its slices.
    """
    index = {machine.id: place for place, machine in enumerate(cost.topology.contributors)}
    count = cost.workload.microbatches
    shares: Sequence[int] | None = None
    if all(worker in index for worker in stage):
        shares = cost.shares([index[worker] for worker in stage], *shard)
    if shares is None:
        each = cost.workload.slice_microbatches
        shares = [each * number for number in even_shares(count // each, len(stage))]
    return dealt(stage, shares)


# -- reports for the user and the planner ----------------------------------------------------------------------------


def plan_of(membership: Membership, plan: Plan) -> Plan:
    """Return a plan with the members and microbatches of an epoch, for the user.

    The prediction is left out if members or microbatches differ from the plan.
    """
    stages = []
    for stage, workers, owners in zip(plan.stages, membership.stages, membership.owners, strict=True):
        known = {member.contributor_id: member for member in stage.members}
        members = tuple(
            known[worker].model_copy(
                update={
                    "microbatches": tuple(
                        microbatch for microbatch, owner in enumerate(owners) if owner == worker
                    )
                }
            )
            for worker in workers
        )
        stages.append(stage.model_copy(update={"members": members}))
    is_as_planned = stages_of(plan) == membership.stages and owners_of(plan) == membership.owners
    prediction = plan.prediction if is_as_planned else None
    return plan.model_copy(
        update={"epoch": membership.epoch, "stages": tuple(stages), "prediction": prediction}
    )


def standing(membership: Membership, solution: Solution) -> Solution:
    """Return the solution that an epoch carries out, with a simulated step if `solution` has one.

    Args:
        membership: membership of the epoch.
        solution: the solution that the epoch is based on. It has the same stages, possibly with more members.
    """
    cost = solution.cost
    index = {machine.id: place for place, machine in enumerate(cost.topology.contributors)}
    stages = []
    for (start, stop), workers, owners in zip(
        membership.shards, membership.stages, membership.owners, strict=True
    ):
        shares = {worker: owners.count(worker) for worker in workers if worker in owners}
        stages.append(
            StageLayout(start, stop, tuple(index[worker] for worker in shares), tuple(shares.values()))
        )
    layout = Layout(tuple(stages))
    timeline = simulate_step(cost, layout) if solution.timeline is not None else None
    plan = plan_of(membership, solution.plan)
    planned = tuple(
        stage.model_copy(
            update={"sums": sum_plan(cost, stage.start, stage.stop, [index[worker] for worker in workers])}
        )
        for stage, workers in zip(plan.stages, membership.stages, strict=True)
    )
    return Solution(plan.model_copy(update={"stages": planned}), cost, layout, timeline)


def computed_again(before: Membership, after: Membership, reports: Collection[Report]) -> int:
    """Return the number of microbatches of the open step that are recomputed; 0 if no member has results.

    Args:
        before: membership of the previous epoch.
        after: membership of the new epoch.
        reports: reports of the remaining members.
    """
    if not any(report.step == after.step and (report.activations or report.summed) for report in reports):
        return 0
    if before.shards != after.shards or after.slices > 1:
        return len(after.tasks[0])
    left = set(after.workers)
    again = {
        microbatch
        for place, stage in enumerate(before.tasks_of(after.step))
        for microbatch, task in enumerate(stage)
        if (task.holder or task.worker) not in left and after.tasks[place][microbatch].forward
    }
    return len(again)
