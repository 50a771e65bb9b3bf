"""Fault injection into the members of a running job.

The gateway imports this module, so this module must not import torch.
"""

from __future__ import annotations

from typing import Literal

from share_compute.errors import Conflict
from share_compute.protocol.membership import Worker
from share_compute_actors.group.naming import all_members_of


def make_fail(job_id: str, worker: Worker, kind: Literal["kill", "stop"], duration_s: float = 0.0) -> None:
    """Make a job's members on one contributor fail; return without waiting for the failure.

    Args:
        job_id: id of the job.
        worker: id of the contributor.
        kind: the failure.
        duration_s: time for which a stopped member stays suspended, in seconds.

    Raises:
        Conflict: no member of the job runs on this contributor.
    """
    members = all_members_of(job_id, worker)
    if not members:
        raise Conflict(
            f"no member of the job runs on {worker} now",
            hint="choose another machine of its plan",
            job=job_id,
        )
    for member in members:
        member.fail.remote(kind, duration_s)
