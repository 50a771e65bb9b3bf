"""Ids under which the members of branches and replicas run."""

from __future__ import annotations


def branch_id(job_id: str, number: int) -> str:
    """Return the id of a branch of a job, ``JOB/n``."""
    return f"{job_id}/{number}"


def owner_of(members_id: str) -> str:
    """Return the job or deployment whose members have this id.

    Args:
        members_id: id of a job, of a branch ``JOB/n``, or of a replica ``DEPLOYMENT/n``.
    """
    return members_id.partition("/")[0]
