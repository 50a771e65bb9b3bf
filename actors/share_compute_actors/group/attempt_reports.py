"""Reports of an attempt to the control plane; the last report describes the end of the attempt."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from share_compute.errors import ShareComputeError
from share_compute.lifecycle.attempt_events import AttemptEnded, AttemptEvent, attempt_events
from share_compute_actors.group.event_feed import EventFeed
from share_compute_actors.group.exceptions import Cancelled

_log = logging.getLogger(__name__)


class AttemptReports:
    """Events of one attempt in their order. Any thread may add events; events after the end are dropped.

    Args:
        job_id: id of the job.
        attempt: number of the attempt.
    """

    def __init__(self, job_id: str, attempt: int) -> None:
        self._job_id = job_id
        self._attempt = attempt
        self._feed: EventFeed[AttemptEvent] = EventFeed()
        self._reporting = threading.Lock()
        self._has_ended = False

    def put(self, event: AttemptEvent) -> None:
        """Add an event."""
        with self._reporting:
            if not self._has_ended:  # the end is the last event
                self._has_ended = isinstance(event, AttemptEnded)
                self._feed.put([event])

    def pull(self, after: int, timeout_s: float) -> str:
        """Return all events except the first ``after`` events, as JSON; see `EventFeed.pull`."""
        return attempt_events.dump_json(self._feed.pull(after, timeout_s)).decode()

    def conclude(self, make: Callable[[], AttemptEnded]) -> None:
        """Call ``make``, and add its event, which describes the end of the attempt."""
        try:
            self.put(make())
        except Cancelled:
            self.put(AttemptEnded(outcome="cancelled", reason="cancelled on request"))
        except ShareComputeError as failure:
            error = {"code": failure.code, **failure.facts()}
            self.put(AttemptEnded(outcome="failed", reason=failure.message, error=error))
        except Exception as failure:  # noqa: BLE001 - an attempt must always say how it ended
            error = {"code": "internal", "hint": "report this together with the job's log"}
            reason = f"{type(failure).__name__}: {failure}"
            _log.exception("attempt %d of %s failed with an internal error", self._attempt, self._job_id)
            self.put(AttemptEnded(outcome="failed", reason=reason, error=error))
