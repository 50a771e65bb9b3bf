"""One attempt at a training job: prepare the data, plan, start the members, train, save the result."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from share_compute.errors import CompilerFailed, LinkLost, ShardStoreLost, StaleEpoch
from share_compute.lifecycle.attempt_events import Assignment, AttemptEnded, Note, Planned
from share_compute.models.factory import dissect
from share_compute.planning.planner import Solution
from share_compute.planning.search.strategies import with_nominal_speeds
from share_compute.protocol.membership import Worker
from share_compute.quantities import listed
from share_compute.specification.boundaries import (
    BoundaryCompression,
    FixedBoundaryCompressionSpec,
    PlannedBoundaryCompressionSpec,
)
from share_compute.topology import Topology
from share_compute_actors.group.answering import ask_shard_store
from share_compute_actors.group.exceptions import MembersLost
from share_compute_actors.training.coordinator.computation import choose_computation, give_up_compiling
from share_compute_actors.training.coordinator.connections import Connections
from share_compute_actors.training.coordinator.planning import plan_attempt, valid_timings
from share_compute_actors.training.coordinator.training_run import TrainingRun
from share_compute_actors.training.membership.epochs import machines_lost
from share_compute_actors.training.membership.takeover import Start, find_takeover, solution_of, state_of
from share_compute_actors.training.membership.training_group import TrainingGroup
from share_compute_actors.training.preparation import prepare
from share_compute_actors.training.shard_store import ShardStore, ShardStoreFacts
from share_compute_actors.training.step_log import StepLog, superseded
from share_compute_actors.wire import NOTHING


class TrainingAttempt:
    """One attempt at a training job.

    Args:
        assignment: the job, and the machines that it may use.
        connections: connections of the attempt.
    """

    def __init__(self, assignment: Assignment, connections: Connections) -> None:
        self._assignment = assignment
        self._connections = connections
        self._requests = connections.requests
        self._report = connections.report

    def make(self) -> AttemptEnded:
        """Run the attempt, and return the event that reports its success.

        Raises:
            Cancelled: the submitter cancelled the job.
            ShareComputeError: the attempt failed.
        """
        with closing(StepLog(self._assignment.folder, self._assignment.attempt)) as step_log:
            step_log.claim()
            shard_store = ShardStore.options(  # type: ignore[attr-defined]
                scheduling_strategy=_here()
            ).remote(self._assignment.model_dump_json())
            try:
                return self._make(step_log, shard_store)
            finally:
                ray.kill(shard_store)

    def _make(self, step_log: StepLog, shard_store: Any) -> AttemptEnded:
        group: TrainingGroup | None = None
        is_over = True
        try:
            facts = prepare(shard_store, self._requests, self._note)
            start = self._start(step_log, facts)
            microbatches = start.solution.plan.microbatches
            spec = self._assignment.spec.with_microbatches(microbatches).with_boundaries(start.boundaries)
            is_fixed = isinstance(start.boundaries, FixedBoundaryCompressionSpec)
            boundaries = start.boundaries.model_dump(mode="json") if is_fixed else None
            ask_shard_store(NOTHING, shard_store.cut.remote(list(start.runs), boundaries))
            assignment = self._assignment.model_copy(update={"spec": spec})
            tied = start.solution.cost.profile.tied_name
            me = ray.get_runtime_context().current_actor
            group = TrainingGroup(
                assignment, facts, shard_store, me, self._requests.cancelled, start.runs, tied, self._note
            )
            if start.takeover is not None:
                group.attach(start.takeover.actors)
                group.compiles = step_log.is_compiled is True  # the members know the choice already
            else:
                self._report(Planned(plan=start.solution.plan))
                group.load(start.solution.plan)
                choose_computation(spec.training.compile, group, step_log, self._report)
            run = TrainingRun(assignment, start, shard_store, group, step_log, self._connections)
            return AttemptEnded(outcome="succeeded", reason=run.run())
        except (ShardStoreLost, LinkLost, StaleEpoch):
            is_over = False  # another attempt continues with the members
            raise
        except Exception as failure:
            if not step_log.is_claimed:
                # A later attempt has claimed the step log and may use the members, so they are not killed.
                is_over = False
                raise superseded() from failure
            if isinstance(failure, CompilerFailed):
                # Some results of the open step are from compiled code, so the members cannot continue eagerly.
                give_up_compiling(failure, step_log, self._report)
            if isinstance(failure, MembersLost):
                topology = self._assignment.topology if group is None else group.topology
                raise machines_lost(topology, failure.workers) from failure
            raise
        finally:
            if group is not None and is_over:
                group.dismiss()

    def _start(self, step_log: StepLog, facts: ShardStoreFacts) -> Start:
        """Take over members of an earlier attempt or, if there are none, plan the job; return the starting point."""
        topology = _without(self._assignment.topology, step_log.quarantined())
        takeover = find_takeover(self._assignment.job_id, with_nominal_speeds(topology), step_log)
        if takeover is None:
            step_log.rewind(facts.first_step - 1, facts.version or 0)
            solution = plan_attempt(self._assignment, facts, topology, self._note)
            runs = facts.runs or max(solution.plan.shares, key=len)
            return Start(facts, solution, runs, facts.state, boundaries=self._boundaries(facts, solution))
        boundaries = takeover.facts.boundaries
        spec = self._assignment.spec.with_microbatches(takeover.facts.plan.microbatches).with_boundaries(
            boundaries
        )
        profile, timings = dissect(facts.blueprint), valid_timings(self._assignment, spec)
        solution = solution_of(takeover, spec, topology, profile, timings)
        state = state_of(step_log, facts.state)
        self._note(
            f"continues at step {state.step + 1} with the members of attempt {takeover.facts.attempt}: "
            + listed(sorted(topology[worker].name for worker in takeover.actors))
        )
        return Start(facts, solution, takeover.facts.runs, state, takeover, boundaries)

    def _boundaries(self, facts: ShardStoreFacts, solution: Solution) -> BoundaryCompression:
        """Return and report the compression at boundaries, which stays the same for the whole job."""
        wanted = self._assignment.spec.training.boundary_compression
        if not isinstance(wanted, PlannedBoundaryCompressionSpec):
            return wanted
        boundaries = facts.boundaries or solution.plan.boundaries
        branch = self._assignment.branch
        if branch is not None and branch.number:  # all branches have the same compression
            return boundaries
        before = [f"layer {layer} ({boundaries.codec(layer)})" for layer in boundaries.layers]
        self._note(
            f"activations and gradients are compressed before {listed(before)}"
            if before
            else "activations and gradients are not compressed: the first plan has no boundary that needs it"
        )
        return boundaries

    def _note(self, message: str, level: Literal["info", "warning", "error"] = "info") -> None:
        self._report(Note(message=message, level=level))


def _without(topology: Topology, quarantined: Collection[Worker]) -> Topology:
    """Return the topology without quarantined machines; the whole topology if all its machines are quarantined."""
    rest = tuple(machine for machine in topology.contributors if machine.id not in quarantined)
    return Topology(rest, topology.links) if rest else topology


def _here() -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
