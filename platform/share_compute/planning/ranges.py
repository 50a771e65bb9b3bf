"""Decides how many machines of a job merge ranges of its weights, and which machines.

With N branches, contributions of C bytes and updates of U bytes, the data of a merge takes this time to pass the
links::

    server alone   = N * C / download + N * U / upload                of the server
    R ranges       = max over machines of max(N * C * (s + b) / R / download, N * C * c / R / upload)
                     + max over machines of (N * U + U) * s / R / upload

A machine is the server of s ranges and the backup of b ranges. It receives contributions for all of them. Meanwhile it
sends to backups the contributions for those c of its s ranges that have one. After the merge, it sends updates to all
branches and to the control plane's machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from share_compute.models.profiles.profile import ModelProfile
from share_compute.planning.branches import contribution_bytes, update_bytes
from share_compute.specification import TrainJob
from share_compute.synchronization.range_machine import CopyRange, MachinesOffered, RangeCopied, RangesMachine
from share_compute.topology import HEAD, Link, Topology, absurdities

_AS_FAST = 0.9
"""Fraction of a machine's rate from which the machine limits a link, and not the server."""
LEAST_GAIN = 0.2
"""Smallest fraction of the server's time for which `auto` merges ranges on machines of the job."""


@dataclass(slots=True)
class _Roles:
    """Numbers of the ranges on one machine."""

    servers: int = 0
    backups: int = 0
    copied: int = 0
    """Number of ranges of which the machine is the server, and another one the backup."""


def range_machines(topology: Topology) -> tuple[str, ...]:
    """Return the ids of all machines, those that send fastest first."""
    order = {machine.id: place for place, machine in enumerate(topology.contributors)}
    return tuple(sorted(order, key=lambda machine: (-_rates(topology, machine)[0], order[machine])))


def merge_s(spec: TrainJob, topology: Topology, profile: ModelProfile, ranges: int) -> float | None:
    """Return the predicted seconds that the data of a merge takes to pass the slowest link; None if unknown.

    Args:
        spec: a job with branches.
        topology: the machines, and the links between them and to the server.
        profile: cost profile of the job's model.
        ranges: number of ranges; 0 if the server merges all.
    """
    policy = spec.training.rounds
    assert policy is not None
    up, down = contribution_bytes(spec.training, profile), update_bytes(spec.training, profile)
    if ranges == 0:
        upload, download = _server_rates(topology)
        return policy.branches * (up / download + down / upload) if upload and download else None
    placed = _placed(ranges, range_machines(topology))
    rates = {machine: _rates(topology, machine) for machine in placed}
    if not placed or not all(upload and download for upload, download in rates.values()):
        return None
    received, sent = policy.branches * up / ranges, (policy.branches * down + down) / ranges
    contributed_s = max(
        max(received * (roles.servers + roles.backups) / download, received * roles.copied / upload)
        for roles, (upload, download) in ((placed[machine], rates[machine]) for machine in placed)
    )
    return contributed_s + max(sent * placed[machine].servers / rates[machine][0] for machine in placed)


def _placed(ranges: int, machines: tuple[str, ...]) -> dict[str, _Roles]:
    """Return the roles of the machines that get ranges, as `RangesMachine` assigns them when a job begins."""
    state = RangesMachine(ranges, 0)
    effects = deque(state.handle(MachinesOffered(machines)))
    while effects:
        effect = effects.popleft()
        if isinstance(effect, CopyRange):
            effects += state.handle(RangeCopied(effect.holder))
    placed: dict[str, _Roles] = {}
    servers = state.servers
    for number, machine in state.holders:
        roles = placed.setdefault(machine, _Roles())
        if servers[number] == machine:
            roles.servers += 1
        else:
            roles.backups += 1
            placed[servers[number] or ""].copied += 1
    return placed


def ranges_of(spec: TrainJob, topology: Topology, profile: ModelProfile) -> int:
    """Return the number of ranges of a job with branches; 0 if the server merges all."""
    policy = spec.training.rounds
    assert policy is not None
    if policy.ranges != "auto":
        return policy.ranges
    alone_s = merge_s(spec, topology, profile, 0)
    found = {
        count: merge_s(spec, topology, profile, count) for count in range(1, len(topology.contributors) + 1)
    }
    known = {count: seconds for count, seconds in found.items() if seconds is not None}
    best = min(known, key=lambda count: (known[count], count), default=0)
    pays = alone_s is not None and best > 0 and known[best] <= (1 - LEAST_GAIN) * alone_s
    return best if pays else 0


def with_ranges(spec: TrainJob, ranges: int) -> TrainJob:
    """Return a job with branches whose ``training.synchronization.servers`` is a number instead of auto."""
    policy = spec.training.rounds
    if policy is None or policy.ranges != "auto":
        return spec
    chosen = policy.model_copy(update={"servers": ranges})
    training = spec.training.model_copy(update={"synchronization": chosen})
    return spec.model_copy(update={"training": training})


def _rates(topology: Topology, machine: str) -> tuple[float, float]:
    """Return the rates at which a machine sends and receives, in bytes/s; 0.0 where no link was measured.

    Links to other machines are used, if any were measured. A direction without a measured link gets the rate of the
    other direction.
    """
    ours = [link for link in _known(topology) if machine in (link.source, link.target)]
    between = [link for link in ours if HEAD not in (link.source, link.target)]
    return _limited(topology, machine, *_fastest(machine, between or ours))


def _server_rates(topology: Topology) -> tuple[float, float]:
    """Return the rates at which the server sends to all machines and receives from them, in bytes/s.

    If the machine limits a link, the link does not show the server's own rate. The server's rate is then at least the
    sum of these links, because transfers with several machines run at the same time.
    """
    links = [link for link in _known(topology) if HEAD in (link.source, link.target)]
    limited = [0.0, 0.0]
    for machine in topology.contributors:
        between = [
            link
            for link in _known(topology)
            if machine.id in (link.source, link.target) and HEAD not in (link.source, link.target)
        ]
        own = _limited(topology, machine.id, *_fastest(machine.id, between))
        sent, received = _fastest(
            machine.id, [link for link in links if machine.id in (link.source, link.target)]
        )
        for direction, (rate, most) in enumerate(((received, own[1]), (sent, own[0]))):
            if most and rate >= _AS_FAST * most:
                limited[direction] += min(rate, most)
    upload, download = _fastest(HEAD, links)
    return max(upload, limited[0]), max(download, limited[1])


def _known(topology: Topology) -> list[Link]:
    return [link for link in topology.links if not link.is_dead and not any(absurdities(link))]


def _fastest(machine: str, links: Iterable[Link]) -> tuple[float, float]:
    """Return the highest bandwidth of links from a machine and of links to it; 0.0 if no link was measured."""
    found = list(links)
    upload = max((link.bytes_per_s for link in found if link.source == machine), default=0.0)
    download = max((link.bytes_per_s for link in found if link.target == machine), default=0.0)
    return upload or download, download or upload


def _limited(topology: Topology, machine: str, upload: float, download: float) -> tuple[float, float]:
    """Return rates of a machine, limited to those that its owner allows."""
    for each in topology.contributors:
        if each.id == machine:
            upload = min(upload, each.upload_bytes_per_s or upload)
            download = min(download, each.download_bytes_per_s or download)
    return upload, download
