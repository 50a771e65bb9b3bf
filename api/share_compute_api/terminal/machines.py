"""Finds a machine by its name or id, and returns the job or deployment of a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from share_compute.errors import NotFound

if TYPE_CHECKING:
    from share_compute.store.records import ContributorRecord
    from share_compute_api.client.client import Client


def machine_called(name_or_id: str, machines: Sequence[ContributorRecord]) -> ContributorRecord:
    """Return the first machine with this name or id.

    Raises:
        NotFound: there is no such machine; the error suggests a machine with a similar name.
    """
    from share_compute.files.strict import suggestion

    found = next((one for one in machines if name_or_id in (one.id, one.name)), None)
    if found is None:
        names = [one.name for one in machines]
        raise NotFound(
            f"there is no machine {name_or_id}{suggestion(name_or_id, names)}",
            hint="share-compute contributors lists names and ids",
        )
    return found


def served_names(client: Client, machines: Sequence[ContributorRecord]) -> dict[str, str]:
    """Return the names of deployments by id; empty, without a request, if no machine serves a deployment."""
    serves = any(one.deployment_id for one in machines)
    return {one.id: one.name for one in client.deployments(limit=500).deployments} if serves else {}


def work_of(machine: ContributorRecord, served: Mapping[str, str]) -> str | None:
    """Return the job that a machine trains, or the deployment that it serves; None if it is free.

    Args:
        machine: the machine.
        served: id -> name of the deployments.
    """
    serves = machine.deployment_id
    return machine.job_id or (f"serves {escape(served.get(serves, serves))}" if serves else None)
