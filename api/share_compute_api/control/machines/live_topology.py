"""Builds the topology of contributors.

Machines and links with impossible figures are left out. Similar figures of machines on the same cores become equal.
Links are at most as fast as the rates that owners allow.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from share_compute.device_kinds import KINDS
from share_compute.errors import VerificationFailed
from share_compute.planning.cost.timings import is_alike
from share_compute.quantities import bytes_text
from share_compute.store import ContributorRecord
from share_compute.topology import HEAD, Contributor, Device, Link, Topology, absurdities, limited_links

_log = logging.getLogger(__name__)


def require_sound(devices: Iterable[Device], machine: str, lent_bytes: int | None = None) -> None:
    """Raise VerificationFailed if a device's figures are impossible, or CPUs have more memory than the machine lends.

    Args:
        devices: the devices that the probe reported.
        machine: name of the contributor, for the error.
        lent_bytes: main memory that the contributor lends, in bytes; None if unknown.
    """
    devices = tuple(devices)
    own_bytes = sum(each.memory_bytes for each in devices if KINDS[each.kind].uses_main_memory)
    if lent_bytes is not None and own_bytes > lent_bytes:
        raise VerificationFailed(
            f"it says that it has {bytes_text(own_bytes)} of memory, but lends {bytes_text(lent_bytes)}",
            hint="end its agent, and let it join again with a new invite",
            machine=machine,
        )
    for device in devices:
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


def live_topology(records: Iterable[ContributorRecord], ranks: int = 1) -> Topology:
    """Return the topology of these contributors: their devices, and the links among them and to the head.

    Contributors and links with impossible figures are left out. Similar CPUs of one computer get their median figures:
    otherwise a plan would give the most layers to the machine with the luckiest measurement.

    Args:
        records: the contributors.
        ranks: ranks of each member of the job (`Contributor.ranks`).
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
    contributors = _with_common_figures([machine.machine() for machine in machines])
    links = (
        link
        for machine in machines
        for link in sound_links(machine.links or (), machine.name)
        if link.source in offered and link.target in offered
    )
    return Topology(contributors, limited_links(contributors, links)).with_ranks(ranks)


def _with_common_figures(machines: Sequence[Contributor]) -> tuple[Contributor, ...]:
    """Return the machines, with median figures for those that compute on the same cores and have similar figures."""
    sharing: dict[tuple[str, int], list[Contributor]] = defaultdict(list)
    for machine in machines:
        if machine.host and len(machine.devices) == 1 and machine.device.kind == "cpu":
            sharing[machine.host, machine.cpu_threads].append(machine)
    common = {
        machine.id: _median_device([other.device for other in group])
        for on_host in sharing.values()
        for group in _alike(on_host)
        for machine in group
    }
    return tuple(
        _with_figures(machine, common[machine.id]) if machine.id in common else machine
        for machine in machines
    )


def _alike(machines: Sequence[Contributor]) -> list[list[Contributor]]:
    """Group machines by their speed, so that all machines of a group have similar figures.

    A machine whose figures differ may compute under other conditions, for example in a container with a part of a core.
    """
    groups: list[list[Contributor]] = []
    for machine in sorted(machines, key=lambda one: one.flops_per_s()):
        if groups and all(is_alike(machine.device, other.device) for other in groups[-1]):
            groups[-1].append(machine)
        else:
            groups.append([machine])
    return groups


def _median_device(devices: Sequence[Device]) -> Device:
    """Return the first device with the median of each figure over all devices that were measured."""
    dtypes = {dtype for device in devices for dtype in device.flops_per_s}
    return replace(
        devices[0],
        flops_per_s={
            dtype: median(device.flops_per_s[dtype] for device in devices if dtype in device.flops_per_s)
            for dtype in sorted(dtypes)
        },
        memory_bytes_per_s=_median([device.memory_bytes_per_s for device in devices]),
        overhead_s=_median([device.overhead_s for device in devices]),
    )


def _median(values: Sequence[float]) -> float:
    """Return the median of the values above 0; 0, which means that nothing was measured, if there are none."""
    return median([value for value in values if value > 0] or [0.0])


def _with_figures(machine: Contributor, common: Device) -> Contributor:
    own = machine.device
    changed = replace(
        own,
        flops_per_s={dtype: common.flops_per_s[dtype] for dtype in own.flops_per_s},
        memory_bytes_per_s=common.memory_bytes_per_s,
        overhead_s=common.overhead_s,
    )
    return replace(machine, devices=tuple(changed if device is own else device for device in machine.devices))
