"""The coordinator: one actor on the head that makes one attempt at a job, and tells what happens as events.

This module is what the control plane imports, so it is light; the attempt itself is in `attempt`, where torch is.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any

import ray

from share_compute.errors import ShareComputeError
from share_compute.jobs.events import Assignment, AttemptEnded, AttemptEvent, Offer, attempt_events
from share_compute_actors.unpickling import refuse_pickles

_log = logging.getLogger(__name__)


class Cancelled(Exception):
    """The submitter cancelled the job."""


class Wishes:
    """What the control plane asks of an attempt while it runs; any thread may say or read it."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.suspended = threading.Event()
        """Set when the attempt is to save where training stands, and to end: another attempt goes on from there."""
        self._lock = threading.Lock()
        self._leaving: set[str] = set()
        self.offered: Offer | None = None
        """The machines that the attempt may use from now on, if that was told since it began."""

    def leave(self, contributor_id: str) -> None:
        """Ask the attempt to do without a machine."""
        with self._lock:
            self._leaving.add(contributor_id)

    def offer(self, offer: Offer) -> None:
        """Say which machines may be used, whatever was asked before."""
        with self._lock:
            self.offered = offer
            self._leaving.difference_update(machine.id for machine in offer.topology.contributors)

    @property
    def leaving(self) -> frozenset[str]:
        """Machines to do without."""
        with self._lock:
            return frozenset(self._leaving)


@ray.remote(num_cpus=0, concurrency_groups={"run": 1, "control": 4, "mail": 1})
class Coordinator:
    """Makes one attempt at one job.

    Args:
        assignment: an `Assignment` as JSON.
    """

    def __init__(self, assignment: str) -> None:
        refuse_pickles()
        self._assignment = Assignment.model_validate_json(assignment)
        self._events: list[AttemptEvent] = []
        self._received = 0
        self._news = threading.Condition()
        self._wishes = Wishes()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    @ray.method(concurrency_group="run")
    def run(self) -> None:
        """Make the attempt; the last event says how it ended."""
        try:
            from share_compute_actors.coordinator.attempt import TrainingAttempt  # noqa: PLC0415 - loads torch

            attempt = TrainingAttempt(self._assignment, self._tell, self._wishes, self._inbox)
            self._tell(attempt.make())
        except Cancelled:
            self._tell(AttemptEnded(outcome="cancelled", reason="cancelled on request"))
        except ShareComputeError as failure:
            error = {"code": failure.code, **failure.facts()}
            self._tell(AttemptEnded(outcome="failed", reason=failure.message, error=error))
        except Exception as failure:  # noqa: BLE001 - an attempt must always say how it ended
            error = {"code": "internal", "mend": "report this together with the job's log"}
            reason = f"{type(failure).__name__}: {failure}"
            _log.exception(
                "attempt %d of %s made a mistake", self._assignment.attempt, self._assignment.job_id
            )
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

    @ray.method(concurrency_group="mail")
    def hear(self, worker: str, key: bytes, message: bytes) -> None:
        """Take in what a member says; `Conductor` knows whether it is that member, and what it means."""
        self._inbox.put((worker, key, message))

    @ray.method(concurrency_group="control")
    def cancel(self) -> None:
        """Ask the attempt to end at the next step."""
        self._wishes.cancelled.set()

    @ray.method(concurrency_group="control")
    def suspend(self) -> None:
        """Ask the attempt to write a checkpoint after the step it is in, and to end."""
        self._wishes.suspended.set()

    @ray.method(concurrency_group="control")
    def offer(self, offer: str) -> None:
        """Say which machines the attempt may use from now on: an `Offer` as JSON; what it holds is not taken away."""
        self._wishes.offer(Offer.model_validate_json(offer))

    @ray.method(concurrency_group="control")
    def drain(self, contributor_id: str) -> None:
        """Ask the attempt to hand over what a machine holds, and to do without it."""
        self._wishes.leave(contributor_id)

    def _tell(self, event: AttemptEvent) -> None:
        with self._news:
            self._events.append(event)
            self._news.notify_all()
