"""Members in the cluster, whoever started them; and the one boundary where Ray's errors over them become ours.

Members outlive their coordinators, so what the store says of attempts and leases does not say where they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from share_compute.errors import Unavailable


def jobs_with_members() -> Collection[str]:
    """Return the jobs that have members in the cluster; Unavailable when Ray does not answer."""
    from share_compute_actors.member.naming import jobs_with_members

    with _translated():
        return jobs_with_members()


def machines_with_members() -> Mapping[str, Collection[str]]:
    """Return, by contributor, the jobs that have members there; Unavailable when Ray does not answer."""
    from share_compute_actors.member.naming import machines_with_members

    with _translated():
        return machines_with_members()


def end_members(job_id: str) -> int:
    """End all members of a job; return how many there were. Unavailable when Ray does not answer."""
    from share_compute_actors.member.naming import end_members

    with _translated():
        return end_members(job_id)


@contextmanager
def _translated() -> Iterator[None]:
    import ray
    from ray.exceptions import RayError

    if not ray.is_initialized():  # or Ray would start a cluster of its own
        raise Unavailable("the server is not connected to Ray", mend="start it again")
    try:
        yield
    except RayError as failure:
        raise Unavailable(
            f"Ray does not say where members are: {type(failure).__name__}: {failure}",
            mend="look into the server's log",
        ) from failure
