"""The coordinator: one actor on the head that runs one attempt at a job, and reports its progress as events.

The control plane imports this module. To keep this import fast, only `Coordinator.run` imports torch.
"""

from __future__ import annotations

import queue
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from share_compute.lifecycle.attempt_events import (
    Assignment,
    AttemptEnded,
    AttemptEvent,
    TrafficMeasured,
)
from share_compute_actors.group.attempt_actor import AttemptActor
from share_compute_actors.machine.stalled import close_stalled_connections
from share_compute_actors.training.rounds.messages import (
    BranchMail,
    BranchReport,
    BranchUpdates,
    servers_of_ranges,
)
from share_compute_actors.unpickling import refuse_pickles


@ray.remote(num_cpus=0, concurrency_groups={"run": 1, "control": 4, "mail": 1})
class Coordinator(AttemptActor):
    """Runs one attempt at one job, or at one branch of a job whose branches merge in rounds.

    Args:
        assignment: an `Assignment` as JSON.
        synchronizer: for a branch, the coordinator of the job, which merges the branches.
    """

    def __init__(self, assignment: str, synchronizer: Any = None) -> None:
        refuse_pickles()
        close_stalled_connections()
        self._assignment = Assignment.model_validate_json(assignment)
        super().__init__(self._assignment.job_id, self._assignment.attempt)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._synchronizer = synchronizer
        self._branch_mail = BranchMail()
        self._updates: queue.SimpleQueue[BranchUpdates] = queue.SimpleQueue()

    @ray.method(concurrency_group="run")
    def run(self) -> None:
        """Run the attempt, and report its progress as events; the last event reports how the attempt ended."""
        self._reports.conclude(self._attempt)

    def _attempt(self) -> AttemptEnded:
        """Make the attempt, or merge the branches of a job that trains in rounds."""
        # These modules load torch.
        from share_compute_actors.training.coordinator.attempt import TrainingAttempt  # noqa: PLC0415
        from share_compute_actors.training.coordinator.connections import Connections  # noqa: PLC0415
        from share_compute_actors.training.rounds.beginning import with_policy  # noqa: PLC0415
        from share_compute_actors.training.rounds.synchronizer import Synchronizer  # noqa: PLC0415

        spec = with_policy(self._assignment, self._requests, self._report)
        assignment = self._assignment.model_copy(update={"spec": spec})
        if assignment.branch is None and assignment.spec.training.rounds is not None:
            return Synchronizer(
                assignment, self._report, self._requests, self._branch_mail, self._start_branch
            ).run()
        connections = Connections(
            self._report, self._requests, self._inbox, self._updates, self._synchronizer
        )
        return TrainingAttempt(assignment, connections).make()

    def _start_branch(self, assignment: Assignment) -> Any:
        """Start the coordinator of a branch on this node, and return its actor."""
        context = ray.get_runtime_context()
        return Coordinator.options(  # type: ignore[attr-defined]
            scheduling_strategy=NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
        ).remote(assignment.model_dump_json(), context.current_actor)

    @ray.method(concurrency_group="mail")
    def receive(self, worker: str, key: bytes, message: bytes) -> None:
        """Queue a message from a member. `Conductor` later checks the key before it reads the message."""
        self._inbox.put((worker, key, message))

    @ray.method(concurrency_group="mail")
    def contributed(self, report: str) -> None:
        """Queue a branch's report that its contribution is complete.

        Args:
            report: a `BranchReport` as JSON.
        """
        self._branch_mail.reports.put(BranchReport.model_validate_json(report))

    @ray.method(concurrency_group="control")
    def range_servers(self) -> str:
        """Return the `RangeAddress` of the server of each range as JSON; an empty list while one of them is missing."""
        return servers_of_ranges.dump_json(self._branch_mail.servers).decode()

    @ray.method(concurrency_group="control")
    def accuse_range_server(self, actor: str, reason: str) -> None:
        """Report that the server of a range cannot store a contribution.

        Args:
            actor: name of its actor.
            reason: its answer, for the user.
        """
        self._branch_mail.accused.put((actor, reason))

    @ray.method(concurrency_group="mail")
    def take_updates(self, updates: str) -> None:
        """Queue the updates of merges for this branch.

        Args:
            updates: a `BranchUpdates` as JSON.
        """
        self._updates.put(BranchUpdates.model_validate_json(updates))

    @ray.method(concurrency_group="mail")
    def exchanged(self, report: str) -> None:
        """Report the bytes that the members of a branch sent and received.

        Args:
            report: a `TrafficMeasured` as JSON.
        """
        self._report(TrafficMeasured.model_validate_json(report))

    def _report(self, event: AttemptEvent) -> None:
        self._reports.put(event)
