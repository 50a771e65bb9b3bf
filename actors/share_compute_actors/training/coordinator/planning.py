"""The first plan of an attempt that does not take over members of an earlier attempt."""

from __future__ import annotations

from typing import Literal, Protocol

from share_compute.errors import PlanInfeasible
from share_compute.lifecycle.attempt_events import Assignment
from share_compute.models.factory import dissect
from share_compute.planning.cost.timings import Timings, holding
from share_compute.planning.planner import Solution, solve
from share_compute.specification import TrainJob
from share_compute.topology import Topology
from share_compute_actors.training.shard_store import ShardStoreFacts


class Notes(Protocol):
    """Function that adds a line to the job's log."""

    def __call__(self, message: str, level: Literal["info", "warning", "error"] = "info") -> None:
        """Add the line."""


def plan_attempt(assignment: Assignment, facts: ShardStoreFacts, topology: Topology, note: Notes) -> Solution:
    """Plan a job. If the job has run before and its pinned plan no longer holds, ignore the pinned plan.

    Args:
        assignment: the attempt.
        facts: facts of the shard store; they may fix the number of microbatches and the boundaries.
        topology: the machines that the plan may use.
        note: called with each line for the job's log.

    Raises:
        PlanInfeasible: no plan fits the machines, or the pinned plan does not hold at the first run.
    """
    spec, pinned = assignment.spec, assignment.spec.parallelism.plan
    if facts.microbatches is not None:
        spec = spec.with_microbatches(facts.microbatches)
    # called even if the plan does not hold, so that a later attempt can use the timings
    elif pinned is not None:
        spec = spec.with_microbatches(pinned.microbatches)
    if facts.boundaries is not None:
        spec = spec.with_boundaries(facts.boundaries)
    timings = valid_timings(assignment, spec)
    if timings:
        count = sum(map(len, timings.values()))
        note(f"planned with {count} measured times of layers, which earlier attempts left")
    profile, epoch = dissect(facts.blueprint), assignment.epoch
    try:
        return solve(spec, topology, profile, epoch, timings)
    except PlanInfeasible as failure:
        if pinned is None or not assignment.has_run:
            raise
        note(f"the pinned plan no longer holds, and the job is planned anew: {failure.message}", "warning")
        return solve(spec.without_pinned_plan(), topology, profile, epoch, timings)


def valid_timings(assignment: Assignment, spec: TrainJob) -> Timings:
    """Return the layer timings of earlier attempts that are still valid.

    Return an empty dictionary if ``spec`` fixes no number of microbatches.
    """
    if spec.training.microbatches is None:
        return {}
    return holding(assignment.timings, assignment.topology, spec.training.microbatch_size)
