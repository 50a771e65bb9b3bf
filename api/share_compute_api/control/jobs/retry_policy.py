"""Retry policy: another attempt, or the end of the job, after an attempt without a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from share_compute.errors import (
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
"""Most attempts in a row that may be lost before they committed a step."""
_MISSING_MACHINES = "let another machine join"


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt's end without a result."""

    reason: str
    error: dict[str, Any]
    """Code and facts of the error."""
    is_lost: bool
    """Whether something it ran on was lost: machines, its coordinator or its shard store."""
    leaves_members: bool = False
    """Whether its members may live on, so that another attempt continues with them."""

    @classmethod
    def told(cls, reason: str, error: dict[str, Any] | None) -> Failure:
        """Return the failure that an attempt reported itself."""
        error = error or {}
        code = error.get("code")
        leaves_members = code in (ShardStoreLost.code, LinkLost.code)
        return cls(reason, error, code == ContributorLost.code or leaves_members, leaves_members)

    @classmethod
    def noticed(cls, failure: ShareComputeError) -> Failure:
        """Return the failure of an attempt that could not be followed any longer."""
        error = {"code": failure.code, **failure.facts()}
        is_lost = isinstance(failure, ContributorLost | Unavailable)
        return cls(failure.message, error, is_lost, leaves_members=is_lost)


@dataclass(frozen=True, slots=True)
class Again:
    """The job is queued for another attempt."""

    why: str
    fruitless_attempts: int
    needs_others: bool
    """Whether the job is offered only machines that were not tried; else the same ones, after a pause."""
    rests: bool = True
    """Whether the job pauses first; members that wait for another coordinator should not wait long."""


def may_wait(job: JobRecord, *, others_run: bool) -> bool:
    """Return whether a job that does not fit now may fit later.

    A job that was placed once fits when as many machines are there as then, because nothing else has changed since. Any
    other job can only fit after running jobs give their machines back.
    """
    return job.started_at is not None or others_run


def sequel(job: JobRecord, failure: Failure, *, has_committed: bool, others_run: bool) -> Again | None:
    """Return how a job continues after an attempt that failed; None when the job fails with it.

    Args:
        job: the job as it was when the attempt began.
        failure: how the attempt ended.
        has_committed: whether the attempt had committed a step.
        others_run: whether other jobs hold machines right now.
    """
    fruitless = 0 if has_committed else job.fruitless_attempts
    if failure.error.get("code") == PlanInfeasible.code:
        if not may_wait(job, others_run=others_run):
            return None
        return Again(_lacking(failure, others_run=others_run), fruitless, needs_others=True)
    fruitless += not has_committed
    if not failure.is_lost or fruitless >= _MOST_FRUITLESS:
        return None
    return Again(
        failure.reason, fruitless, needs_others=False, rests=not failure.leaves_members or fruitless > 1
    )


def _lacking(failure: Failure, *, others_run: bool) -> str:
    """Say what a job that does not fit waits for."""
    missing = failure.error.get("details", {}).get("missing_bytes")
    needs = f"needs about {bytes_text(missing)} more memory" if missing else failure.reason
    hint = failure.error.get("hint", _MISSING_MACHINES)
    other = ", or wait until other jobs give machines back" if others_run else ""
    return f"waiting for contributors: {needs}: {hint}{other}"
