"""Retry policy: decides whether a job is queued again after a failed attempt, or fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from share_compute.errors import (
    CompilerFailed,
    ContributorLost,
    LinkLost,
    PlanInfeasible,
    ShardStoreLost,
    ShareComputeError,
    Unavailable,
)
from share_compute.quantities import bytes_text
from share_compute.store import JobRecord

_MOST_FRUITLESS = 5
"""Number of consecutive lost attempts without a committed step after which the job fails."""
_MISSING_MACHINES = "let another machine join"


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """The failure that ended an attempt."""

    reason: str
    error: dict[str, Any]
    """``code`` and facts of the error; empty if the attempt reported none."""
    is_lost: bool
    """Whether something that the attempt needs was lost: a machine, its compiler, a link, the coordinator or the
    shard store."""
    leaves_members: bool = False
    """Whether the job's members may still run, so that another attempt can continue with them."""

    @classmethod
    def reported(cls, reason: str, error: dict[str, Any] | None) -> AttemptFailure:
        """Return the failure that the attempt itself reported."""
        error = error or {}
        code = error.get("code")
        leaves_members = code in (ShardStoreLost.code, LinkLost.code)
        is_lost = code in (ContributorLost.code, CompilerFailed.code) or leaves_members
        return cls(reason, error, is_lost, leaves_members)

    @classmethod
    def noticed(cls, failure: ShareComputeError) -> AttemptFailure:
        """Return the failure of an attempt that the supervisor could not start, or could not follow to its end."""
        error = {"code": failure.code, **failure.facts()}
        is_lost = isinstance(failure, ContributorLost | Unavailable)
        return cls(failure.message, error, is_lost, leaves_members=is_lost)


@dataclass(frozen=True, slots=True)
class Again:
    """The decision to queue the job for another attempt."""

    why: str
    fruitless_attempts: int
    needs_others: bool
    """Whether the job waits for machines that were not tried. If false, it may start on the same machines again."""
    pauses: bool = True
    """Whether the job pauses before the attempt. A job whose members may still run pauses only after two or more
    consecutive fruitless attempts."""


def may_wait(job: JobRecord, *, others_run: bool) -> bool:
    """Return whether a job that does not fit on the present machines may fit later.

    A job that ran before can fit again when as many machines are present as before. Any other job can fit only after
    running jobs have released their machines.
    """
    return job.started_at is not None or others_run


def next_attempt(
    job: JobRecord, failure: AttemptFailure, *, has_committed: bool, others_run: bool
) -> Again | None:
    """Return how a job is queued again after a failed attempt; None if the job fails, too.

    A pinned plan for another model (``is_lasting``) can be carried out on no machines.

    Args:
        job: the job at the beginning of the attempt.
        failure: how the attempt ended.
        has_committed: whether the attempt had committed a step.
        others_run: whether other jobs hold machines right now.
    """
    fruitless = 0 if has_committed else job.fruitless_attempts
    if failure.error.get("code") == PlanInfeasible.code:
        is_lasting = failure.error.get("details", {}).get("is_lasting", False)
        if is_lasting or not may_wait(job, others_run=others_run):
            return None
        return Again(_lacking(failure, others_run=others_run), fruitless, needs_others=True)
    fruitless += not has_committed
    if not failure.is_lost or fruitless >= _MOST_FRUITLESS:
        return None
    return Again(
        failure.reason, fruitless, needs_others=False, pauses=not failure.leaves_members or fruitless > 1
    )


def _lacking(failure: AttemptFailure, *, others_run: bool) -> str:
    """Return the reason, for users, why a job that does not fit on the present machines waits."""
    missing = failure.error.get("details", {}).get("missing_bytes")
    needs = f"needs about {bytes_text(missing)} more memory" if missing else failure.reason
    hint = failure.error.get("hint", _MISSING_MACHINES)
    other = ", or wait until other jobs give machines back" if others_run else ""
    return f"waiting for contributors: {needs}: {hint}{other}"
