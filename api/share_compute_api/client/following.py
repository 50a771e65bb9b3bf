"""Follows the events of a job over several connections, without sending requests itself."""

from __future__ import annotations

import time
from typing import Any

import httpx
from httpx_sse import ServerSentEvent

from share_compute.lifecycle.states import JobState
from share_compute.store.records import EventRecord, JobRecord
from share_compute_api.client.calls import path_part
from share_compute_api.connection.backoff import ExponentialBackoff

_READ_TIMEOUT_S = 30.0
"""Read timeout of a stream, in seconds; the server sends a keep-alive after 10 s without an event."""
_PAUSES_S = (0.1, 5.0)
"""First and longest delay before a stream is reopened, in seconds."""


class FollowedEvents:
    """State of a client that follows the events of a job.

    Args:
        job_id: the job.
        after: number of the last event that the caller already has.
        patience_s: time without an answer after which the client gives up, in seconds.
    """

    def __init__(self, job_id: str, after: int, patience_s: float) -> None:
        self.path = f"/jobs/{path_part(job_id)}/events"
        self.seen = after
        """Number of the last event that arrived."""
        self._patience_s = patience_s
        self._last_contact_s = time.monotonic()
        self._backoff = ExponentialBackoff(*_PAUSES_S)

    def options(self) -> dict[str, Any]:
        """Return the arguments for the next connection: its headers and timeout."""
        timeout = httpx.Timeout(10.0, read=_READ_TIMEOUT_S)
        return {"headers": {"Last-Event-ID": str(self.seen)}, "timeout": timeout}

    def read(self, item: ServerSentEvent) -> EventRecord | None:
        """Return the event that arrived; None for a keep-alive."""
        self._last_contact_s = time.monotonic()
        self._backoff.reset()
        if not item.data:
            return None
        event = EventRecord.model_validate_json(item.data)
        self.seen = event.seq
        return event

    def pause_s(self, failure: httpx.TransportError | None) -> float:
        """Return the delay before the next connection, in seconds; raise the failure if patience is over."""
        if failure is not None and time.monotonic() - self._last_contact_s > self._patience_s:
            raise failure
        return self._backoff.failed()


def may_be_last(event: EventRecord) -> bool:
    """Return whether an event may be the last one of a job: its attempt ended."""
    return event.kind == "state" and JobState(event.data["state"]).is_final


def is_last(event: EventRecord, job: JobRecord) -> bool:
    """Return whether an event is the last one of a job in its present state."""
    return event.attempt == job.attempt and job.state.is_final
