"""Calls of the control plane that every coordinator of an attempt answers."""

from __future__ import annotations

import ray

from share_compute.lifecycle.attempt_events import Offer
from share_compute_actors.group.attempt_reports import AttemptReports
from share_compute_actors.group.control_requests import ControlRequests


class AttemptActor:
    """Base of coordinators; an actor class that inherits it has a concurrency group ``control``.

    Args:
        job_id: id of the job.
        attempt: number of the attempt.
    """

    def __init__(self, job_id: str, attempt: int) -> None:
        self._reports = AttemptReports(job_id, attempt)
        self._requests = ControlRequests()

    @ray.method(concurrency_group="control")
    def events(self, after: int, timeout_s: float) -> str:
        """Return all events except the first ``after`` events, as JSON; if there are none, wait for the next event.

        Return an empty list if no event is reported in time.

        Args:
            after: number of events that the caller has received. These events are deleted, so there must be only one
                caller, and the number must never decrease.
            timeout_s: longest wait for an event, in seconds.
        """
        return self._reports.pull(after, timeout_s)

    @ray.method(concurrency_group="control")
    def cancel(self) -> None:
        """Ask the attempt to end soon, without finishing the current step."""
        self._requests.cancelled.set()

    @ray.method(concurrency_group="control")
    def suspend(self) -> None:
        """Ask the attempt to save a checkpoint, if its kind of job has checkpoints, and then to end.

        If its data is still being prepared, the attempt ends without a checkpoint.
        """
        self._requests.suspended.set()

    @ray.method(concurrency_group="control")
    def offer(self, offer: str) -> None:
        """Set the machines that the attempt may use.

        A sparse model starts nothing on machines that it does not use yet.

        Args:
            offer: an `Offer` as JSON.
        """
        self._requests.offer(Offer.model_validate_json(offer))

    @ray.method(concurrency_group="control")
    def drain(self, contributor_id: str) -> None:
        """Ask the attempt to move a machine's shards to other machines, and to stop using the machine."""
        self._requests.leave(contributor_id)
