"""Names the actors of a job's members, so that a later attempt at the job finds the members of an earlier one.

Members are detached actors, so they outlive the coordinator that started them. Each job has its own namespace. So has
each replica of a deployment, whose members outlive its server.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any
from uuid import uuid4

import ray
from ray.util import list_named_actors

from share_compute.device_kinds import KINDS, DeviceKind
from share_compute.protocol.membership import Worker

_PREFIX = "share-compute/"
_GPU_PART = 1 / 8
"""Part of each GPU that it uses that the members of one job reserve in Ray.

The GPU's memory is divided by plans, not by Ray. The rest stays free for members that start before Ray releases the
parts of members that were killed."""
_GPU_UNITS = 10_000
"""Smallest parts into which Ray divides a GPU."""


def member_options(job_id: str, worker: Worker, attempt: int = 0) -> dict[str, Any]:
    """Return the Ray options of a member's actor, which lives until it is killed.

    Args:
        job_id: job of the member, or replica of a deployment.
        worker: contributor of the member.
        attempt: number of the attempt that starts the member.
    """
    return {
        # The suffix is random, because Ray may not have freed the name of a member that was just killed.
        "name": f"{worker}/{attempt}/{uuid4().hex[:8]}",
        "namespace": f"{_PREFIX}{job_id}",
        "lifetime": "detached",
    }


def gpu_options(kind: DeviceKind, branches: int = 1, devices: int = 1) -> dict[str, float]:
    """Return the Ray options with which a member reserves a part of its machine's GPUs; empty for a CPU.

    Args:
        kind: kind of the device that the member computes on.
        branches: number of branches of the job, whose members may all be on one machine.
        devices: number of GPUs that the member computes on. Ray reserves the sum of their parts, up to one GPU.
    """
    if not KINDS[kind].is_gpu:
        return {}
    part = min(1.0, devices * _GPU_PART)
    return {"num_gpus": max(1, int(part * _GPU_UNITS / branches)) / _GPU_UNITS}


def members_of(job_id: str, worker: Worker | None = None) -> list[Any]:
    """Return the actors of a job's members that are not known to be dead, whichever attempt started them.

    Args:
        job_id: the job.
        worker: contributor whose members to return; None for all contributors.
    """
    return [actor for actor, known in workers_of(job_id).items() if worker in (None, known)]


def workers_of(job_id: str) -> dict[Any, Worker]:
    """Return the contributor of each of a job's members, by the member's actor; omit members known to be dead."""
    found = {}
    for namespace, name in _named():
        if namespace == f"{_PREFIX}{job_id}":
            try:
                found[ray.get_actor(name, namespace)] = name.partition("/")[0]
            except ValueError:  # the member died after it was listed
                continue
    return found


def named_member(job_id: str, name: str) -> Any:
    """Return the actor with the name that `member_options` gave it.

    Raises:
        ValueError: there is no such actor, or it is dead.
    """
    return ray.get_actor(name, f"{_PREFIX}{job_id}")


def machines_with_members() -> dict[Worker, frozenset[str]]:
    """Return the ids of the jobs with members on each contributor, by contributor; omit members known to be dead.

    The ids of branches are ``JOB/n``, and those of replicas ``DEPLOYMENT/n``; see `branch_ids.owner_of`.
    """
    found: dict[Worker, set[str]] = defaultdict(set)
    for namespace, name in _named():
        if namespace.startswith(_PREFIX):
            found[name.partition("/")[0]].add(namespace.removeprefix(_PREFIX))
    return {worker: frozenset(jobs) for worker, jobs in found.items()}


def all_members_of(job_id: str, worker: Worker | None = None) -> list[Any]:
    """Return the actors of a job's members and of those of its branches that are not known to be dead.

    Args:
        job_id: the job, or one of its branches.
        worker: contributor whose members to return; None for all contributors.
    """
    namespace = f"{_PREFIX}{job_id}"
    ids = {each for each, _ in _named() if each == namespace or each.startswith(f"{namespace}/")}
    return [actor for each in sorted(ids) for actor in members_of(each.removeprefix(_PREFIX), worker)]


def end_members(job_id: str) -> int:
    """Kill all members of a job and of its branches, and return their number."""
    members = all_members_of(job_id)
    for member in members:
        ray.kill(member)
    return len(members)


def _named() -> list[tuple[str, str]]:
    return [(actor["namespace"], actor["name"]) for actor in list_named_actors(all_namespaces=True)]
