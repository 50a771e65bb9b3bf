"""The coordinator: one actor on the head that makes one attempt at a job, and tells what happens as events.

This module is what the control plane imports, so it is light; the attempt itself is in `attempt`, where torch is.
"""

from __future__ import annotations

import threading

import ray

from share_compute.errors import ShareComputeError
from share_compute.jobs.events import Assignment, AttemptEnded, AttemptEvent, attempt_events


class Cancelled(Exception):
    """The submitter cancelled the job."""


@ray.remote(num_cpus=0, concurrency_groups={"run": 1, "control": 4})
class Coordinator:
    """Makes one attempt at one job.

    Args:
        assignment: an `Assignment` as JSON.
    """

    def __init__(self, assignment: str) -> None:
        self._assignment = Assignment.model_validate_json(assignment)
        self._events: list[AttemptEvent] = []
        self._received = 0
        self._news = threading.Condition()
        self._cancelled = threading.Event()

    @ray.method(concurrency_group="run")
    def run(self) -> None:
        """Make the attempt; the last event says how it ended."""
        from share_compute_actors.attempt import TrainingAttempt  # noqa: PLC0415 - loads torch

        try:
            self._tell(TrainingAttempt(self._assignment, self._tell, self._cancelled).make())
        except Cancelled:
            self._tell(AttemptEnded(outcome="cancelled", reason="cancelled on request"))
        except ShareComputeError as failure:
            error = {"code": failure.code, **failure.facts()}
            self._tell(AttemptEnded(outcome="failed", reason=failure.message, error=error))
        except Exception as failure:  # noqa: BLE001 - an attempt must always say how it ended
            error = {"code": "internal", "mend": "report this together with the job's log"}
            reason = f"{type(failure).__name__}: {failure}"
            self._tell(AttemptEnded(outcome="failed", reason=reason, error=error))

    @ray.method(concurrency_group="control")
    def events(self, after: int, timeout_s: float) -> str:
        """Return the events that followed the first ``after`` ones, as JSON; waits for the next if there is none.

        ``after`` never goes back: it says how many events the one caller has received.
        """
        with self._news:
            self._news.wait_for(lambda: self._received + len(self._events) > after, timeout_s)
            # What the caller has received is not kept: a long job tells millions of events.
            del self._events[: after - self._received]
            self._received = after
            return attempt_events.dump_json(self._events).decode()

    @ray.method(concurrency_group="control")
    def cancel(self) -> None:
        """Ask the attempt to end at the next step."""
        self._cancelled.set()

    def _tell(self, event: AttemptEvent) -> None:
        with self._news:
            self._events.append(event)
            self._news.notify_all()
