"""State machine of jobs, and states of contributors."""

from __future__ import annotations

from enum import StrEnum

from share_compute.errors import Conflict


class JobState(StrEnum):
    """State of a job."""

    queued = "queued"
    planning = "planning"
    running = "running"
    succeeded = "succeeded"
    failed = "failed"
    cancelled = "cancelled"

    @property
    def is_final(self) -> bool:
        """Return whether the state is final. A failed or cancelled job can still be resumed, which queues it again."""
        return self in (JobState.succeeded, JobState.failed, JobState.cancelled)


class ContributorState(StrEnum):
    """State of a contributor."""

    joining = "joining"
    """The contributor's agent passed preflight; the raylet is starting."""
    probing = "probing"
    ready = "ready"
    quarantined = "quarantined"
    """The contributor was reported for wrong results, and gets no work until the operator clears it."""
    draining = "draining"
    left = "left"
    lost = "lost"


GONE = (ContributorState.left, ContributorState.lost)
"""States of machines that are absent; they may come back."""
HERE = tuple(state for state in ContributorState if state not in GONE)

_NEXT: dict[JobState, frozenset[JobState]] = {
    JobState.queued: frozenset({JobState.planning, JobState.cancelled, JobState.failed}),
    # A job returns to queued for another attempt.
    JobState.planning: frozenset({JobState.running, JobState.queued, JobState.failed, JobState.cancelled}),
    JobState.running: frozenset({JobState.succeeded, JobState.queued, JobState.failed, JobState.cancelled}),
    JobState.succeeded: frozenset(),
    JobState.failed: frozenset({JobState.queued}),
    JobState.cancelled: frozenset({JobState.queued}),
}


def check_transition(job_id: str, current: JobState, wanted: JobState) -> None:
    """Raise Conflict unless a job may go from ``current`` to ``wanted``."""
    if wanted not in _NEXT[current]:
        allowed = ", ".join(sorted(state.value for state in _NEXT[current]))
        raise Conflict(
            f"job {job_id} is {current.value}; it cannot become {wanted.value}",
            hint=f"from here it can become {allowed}" if allowed else "submit a new job; this one is done",
            job=job_id,
        )
