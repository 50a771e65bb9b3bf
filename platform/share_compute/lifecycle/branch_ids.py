"""Ids of the members of branches and replicas, and of the processes with ranges of weights."""

from __future__ import annotations


def branch_id(job_id: str, number: int) -> str:
    """Return the id of a branch of a job, ``JOB/n``."""
    return f"{job_id}/{number}"


def ranges_id(job_id: str) -> str:
    """Return the id of the processes that merge ranges of a job's weights, ``JOB/ranges``."""
    return f"{job_id}/ranges"


def owner_of(members_id: str) -> str:
    """Return the job or deployment whose members have this id.

    Args:
        members_id: id of a job, of a branch ``JOB/n``, of ranges ``JOB/ranges``, or of a replica ``DEPLOYMENT/n``.
    """
    return members_id.partition("/")[0]
