"""The coordinator: one actor on the head that runs one attempt at a job, and reports its progress as events.

The control plane imports this module. To keep this import fast, only `Coordinator.run` imports torch.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from share_compute.errors import ShareComputeError
from share_compute.lifecycle.attempt_events import (
    Assignment,
    AttemptEnded,
    AttemptEvent,
    Offer,
    TrafficMeasured,
    attempt_events,
)
from share_compute_actors.group.event_feed import EventFeed
from share_compute_actors.group.exceptions import Cancelled
from share_compute_actors.machine.stalled import close_stalled_connections
from share_compute_actors.training.membership.control_requests import ControlRequests
from share_compute_actors.training.rounds.messages import BranchReport, BranchUpdates
from share_compute_actors.unpickling import refuse_pickles

_log = logging.getLogger(__name__)


@ray.remote(num_cpus=0, concurrency_groups={"run": 1, "control": 4, "mail": 1})
class Coordinator:
    """Runs one attempt at one job, or at one branch of a job whose branches merge in rounds.

    Args:
        assignment: an `Assignment` as JSON.
        synchronizer: for a branch, the coordinator of the job, which merges the branches.
    """

    def __init__(self, assignment: str, synchronizer: Any = None) -> None:
        refuse_pickles()
        close_stalled_connections()
        self._assignment = Assignment.model_validate_json(assignment)
        self._feed: EventFeed[AttemptEvent] = EventFeed()
        self._reporting = threading.Lock()
        self._has_ended = False
        self._requests = ControlRequests()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._synchronizer = synchronizer
        self._reports: queue.SimpleQueue[BranchReport] = queue.SimpleQueue()
        self._updates: queue.SimpleQueue[BranchUpdates] = queue.SimpleQueue()

    @ray.method(concurrency_group="run")
    def run(self) -> None:
        """Run the attempt, and report its progress as events; the last event reports how the attempt ended."""
        try:
            self._report(self._attempt())
        except Cancelled:
            self._report(AttemptEnded(outcome="cancelled", reason="cancelled on request"))
        except ShareComputeError as failure:
            error = {"code": failure.code, **failure.facts()}
            self._report(AttemptEnded(outcome="failed", reason=failure.message, error=error))
        except Exception as failure:  # noqa: BLE001 - an attempt must always say how it ended
            error = {"code": "internal", "hint": "report this together with the job's log"}
            reason = f"{type(failure).__name__}: {failure}"
            _log.exception(
                "attempt %d of %s failed with an internal error",
                self._assignment.attempt,
                self._assignment.job_id,
            )
            self._report(AttemptEnded(outcome="failed", reason=reason, error=error))

    def _attempt(self) -> AttemptEnded:
        """Make the attempt, or merge the branches of a job that trains in rounds."""
        # These modules load torch.
        from share_compute_actors.training.coordinator.attempt import TrainingAttempt  # noqa: PLC0415
        from share_compute_actors.training.coordinator.connections import Connections  # noqa: PLC0415
        from share_compute_actors.training.rounds.synchronizer import Synchronizer  # noqa: PLC0415

        assignment = self._assignment
        if assignment.branch is None and assignment.spec.training.rounds is not None:
            return Synchronizer(
                assignment, self._report, self._requests, self._reports, self._start_branch
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

    @ray.method(concurrency_group="control")
    def events(self, after: int, timeout_s: float) -> str:
        """Return all events except the first ``after`` events, as JSON; if there are none, wait for the next event.

        Return an empty list if no event is reported in time.

        Args:
            after: number of events that the caller has received. These events are deleted, so there must be only one
                caller, and the number must never decrease.
            timeout_s: longest wait for an event, in seconds.
        """
        return attempt_events.dump_json(self._feed.pull(after, timeout_s)).decode()

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
        self._reports.put(BranchReport.model_validate_json(report))

    @ray.method(concurrency_group="mail")
    def take_updates(self, updates: str) -> None:
        """Queue the updates of merges for this branch.

        Args:
            updates: a `BranchUpdates` as JSON.
        """
        self._updates.put(BranchUpdates.model_validate_json(updates))

    @ray.method(concurrency_group="control")
    def cancel(self) -> None:
        """Ask the attempt to end soon, without finishing the current step."""
        self._requests.cancelled.set()

    @ray.method(concurrency_group="control")
    def suspend(self) -> None:
        """Ask the attempt to save a checkpoint and then to end.

        If its data is still being prepared, the attempt ends without a checkpoint.
        """
        self._requests.suspended.set()

    @ray.method(concurrency_group="control")
    def offer(self, offer: str) -> None:
        """Set the machines on which the attempt may start members; existing members stay.

        Args:
            offer: an `Offer` as JSON.
        """
        self._requests.offer(Offer.model_validate_json(offer))

    @ray.method(concurrency_group="control")
    def drain(self, contributor_id: str) -> None:
        """Ask the attempt to move a machine's shard to other machines, and to stop using the machine."""
        self._requests.leave(contributor_id)

    @ray.method(concurrency_group="mail")
    def exchanged(self, report: str) -> None:
        """Report what the members of a branch sent and received.

        Args:
            report: a `TrafficMeasured` as JSON.
        """
        self._report(TrafficMeasured.model_validate_json(report))

    def _report(self, event: AttemptEvent) -> None:
        with self._reporting:
            if not self._has_ended:  # the end is the last event
                self._has_ended = isinstance(event, AttemptEnded)
                self._feed.put([event])
