"""Converts plans to the content of plan files."""

from __future__ import annotations

from share_compute.errors import UserError
from share_compute.planning.plan import Plan
from share_compute.specification.placement.pinned_plan import (
    PinnedMember,
    PinnedModel,
    PinnedPlan,
    PinnedStage,
)


def pinned_plan(plan: Plan) -> PinnedPlan:
    """Return the content of a plan file for a plan.

    Raises:
        UserError: the plan has branches, or is not a training plan.
    """
    if plan.branches:
        raise UserError(
            "a plan with branches cannot be pinned: each branch has a plan of its own",
            hint="use training.synchronization {kind: allreduce}, or leave out --output",
        )
    if plan.model_digest is None:
        raise UserError(
            "this plan does not say for which model it is, so it cannot be pinned",
            hint="plan the job for training, on a server of this release",
        )
    return PinnedPlan(
        kind="plan",
        version=1,
        model=PinnedModel(layers=plan.num_layers, parameters=plan.parameters, digest=plan.model_digest),
        microbatches=plan.microbatches,
        stages=tuple(
            PinnedStage(
                first_layer=stage.start,
                last_layer=stage.stop - 1,
                machines=tuple(
                    PinnedMember(
                        name=member.name,
                        microbatches=len(member.microbatches),
                        memory_bytes=member.memory_bytes,
                    )
                    for member in stage.members
                ),
            )
            for stage in plan.stages
        ),
    )
