"""Builds the topology of contributors. Leaves out machines and links with impossible figures."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from share_compute.errors import VerificationFailed
from share_compute.quantities import bytes_text
from share_compute.store import ContributorRecord
from share_compute.topology import HEAD, Device, Link, Topology, absurdities

_log = logging.getLogger(__name__)


def require_sound(devices: Iterable[Device], machine: str, lent_bytes: int | None = None) -> None:
    """Raise VerificationFailed if a device's figures are impossible, or a CPU has more memory than the machine lends.

    Args:
        devices: the devices that the probe reported.
        machine: name of the contributor, for the error.
        lent_bytes: main memory that the contributor lends, in bytes; None if unknown.
    """
    for device in devices:
        if device.kind == "cpu" and lent_bytes is not None and device.memory_bytes > lent_bytes:
            raise VerificationFailed(
                f"it says that it has {bytes_text(device.memory_bytes)} of memory, but lends {bytes_text(lent_bytes)}",
                hint="end its agent, and let it join again with a new invite",
                machine=machine,
            )
        for field, problem in absurdities(device):
            raise VerificationFailed(
                f"it measured {field} of {device.name or device.kind} and {problem}",
                hint="run share-compute doctor there, then let it join again",
                machine=machine,
            )


def sound_links(links: Iterable[Link], machine: str) -> tuple[Link, ...]:
    """Return the links with plausible figures, and log the rejected ones.

    Args:
        links: the measured links.
        machine: name of the contributor that measured.
    """
    kept = []
    for link in links:
        problem = next((f"{field}: {problem}" for field, problem in absurdities(link)), None)
        if problem is None:
            kept.append(link)
        else:
            _log.warning(
                "contributor %s: its link %s - %s is not used, %s", machine, link.source, link.target, problem
            )
    return tuple(kept)


def live_topology(records: Iterable[ContributorRecord]) -> Topology:
    """Return the topology of these contributors: their devices, and the links among them and to the head.

    Contributors and links with impossible figures are left out.
    """
    machines = []
    for record in records:
        try:
            require_sound(record.capacity or (), record.name, record.limits.get("memory_bytes"))
        except VerificationFailed as lie:
            _log.warning("contributor %s is left out of plans: %s", record.name, lie.message)
        else:
            machines.append(record)
    offered = {machine.id for machine in machines} | {HEAD}
    return Topology(
        contributors=tuple(machine.machine() for machine in machines),
        links=tuple(
            link
            for machine in machines
            for link in sound_links(machine.links or (), machine.name)
            if link.source in offered and link.target in offered
        ),
    )
