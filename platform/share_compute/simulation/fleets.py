"""Synthetic fleets: machines of usual kinds at usual sites, with measured links.

Peaks of GPUs are from their vendors' data sheets. Most other figures are assumptions. Links depend on the site:

- A home has Wi-Fi or a switch inside. Its line limits links to other sites: upload at 10 (DSL) to 500 Mbit/s (fibre).
- A campus has 1 Gbit/s to each desk.
- A data centre has 25 Gbit/s in a cluster.

Sites are points in a unit square; one-way latency grows by `_WIDEST_S` per unit of distance. Each machine has links to
the Ray head, which is at the first machine's site, and to at most `_PEERS` machines that joined before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from share_compute.device_kinds import DeviceKind
from share_compute.errors import UserError
from share_compute.simulation.fleet_name import FleetName
from share_compute.topology import HEAD, Contributor, Device, Link, Topology

MOST_MACHINES = 10_000
_GIB = 2**30
_PEERS = 4
_SUSTAINED = (0.55, 0.8)
"""Range of the share of peak FLOP/s, and of peak memory bandwidth, that a machine sustains."""
_OVERHEAD_S: dict[DeviceKind, float] = {"cpu": 5e-6, "cuda": 8e-6}
"""Time of one small operation, in seconds: measured on a server's CPU; assumed for a GPU."""
_WIDEST_S = 0.04
_NOISE = 0.1
"""Standard deviation of the logarithm of a link's measured latency and rate."""


@dataclass(frozen=True, slots=True)
class _MachineKind:
    """Peaks of a kind of machine, and the memory that its owner lends. Values are drawn uniformly from the ranges."""

    name: str
    device: DeviceKind
    memory_gib: tuple[float, float]
    teraflops: tuple[float, float]
    """Peak in float32, in TFLOP/s."""
    half_factor: float
    """Ratio of the peak in bfloat16 to the peak in float32."""
    memory_gb_per_s: tuple[float, float]


_LAPTOP = _MachineKind("laptop", "cpu", (2, 6), (0.15, 0.6), 0.5, (20, 50))
_DESKTOP = _MachineKind("desktop", "cpu", (6, 24), (0.4, 1.5), 0.5, (30, 70))
_SERVER = _MachineKind("server", "cpu", (48, 192), (1.5, 5.0), 1.5, (120, 300))
_LAPTOP_GPU = _MachineKind("laptop with GPU", "cuda", (5, 7), (8, 13), 2.0, (256, 336))
_GAMER = _MachineKind("gaming PC", "cuda", (7, 22), (12.7, 82.6), 2.0, (360, 1008))
_WORKSTATION = _MachineKind("workstation", "cuda", (14, 44), (19.2, 91.1), 2.0, (448, 960))
_A100 = _MachineKind("A100", "cuda", (36, 76), (19.5, 19.5), 16.0, (1555, 2039))
_H100 = _MachineKind("H100", "cuda", (76, 76), (67, 67), 14.8, (3350, 3350))
_L4 = _MachineKind("L4", "cuda", (21, 21), (30.3, 30.3), 4.0, (300, 300))


@dataclass(frozen=True, slots=True, eq=False)
class _SiteKind:
    """A kind of site: ranges of its number of machines and its link figures, and probabilities of machine kinds."""

    machines: tuple[int, int]
    mix: Mapping[_MachineKind, float]
    inner_latency_s: tuple[float, float]
    inner_bytes_per_s: tuple[float, float]
    outer_latency_s: tuple[float, float]
    """Latency to the nearest exchange, one way."""
    outer_bytes_per_s: tuple[float, float]
    spread: float = 1.0
    """Side of the square that contains the sites of this kind, as a share of the unit square's side."""


_HOME = _SiteKind(
    (1, 4),
    {_LAPTOP: 0.45, _DESKTOP: 0.2, _LAPTOP_GPU: 0.15, _GAMER: 0.2},
    inner_latency_s=(0.5e-3, 4e-3),
    inner_bytes_per_s=(15e6, 110e6),
    outer_latency_s=(3e-3, 12e-3),
    outer_bytes_per_s=(1.25e6, 62.5e6),
)
_CAMPUS = _SiteKind(
    (12, 60),
    {_DESKTOP: 0.55, _WORKSTATION: 0.35, _SERVER: 0.1},
    inner_latency_s=(0.15e-3, 0.4e-3),
    inner_bytes_per_s=(90e6, 115e6),
    outer_latency_s=(0.1e-3, 0.4e-3),
    outer_bytes_per_s=(60e6, 110e6),
    spread=0.01,
)
_DATACENTRE = _SiteKind(
    (32, 96),
    {_A100: 0.35, _H100: 0.25, _L4: 0.25, _SERVER: 0.15},
    inner_latency_s=(0.03e-3, 0.08e-3),
    inner_bytes_per_s=(2.2e9, 2.9e9),
    outer_latency_s=(0.1e-3, 0.3e-3),
    outer_bytes_per_s=(100e6, 1.1e9),
    spread=0.5,
)
_FLEETS: dict[FleetName, dict[_SiteKind, float]] = {
    FleetName.home: {_HOME: 1.0},
    FleetName.campus: {_CAMPUS: 1.0},
    FleetName.datacentre: {_DATACENTRE: 1.0},
    FleetName.mixed: {_HOME: 0.6, _CAMPUS: 0.25, _DATACENTRE: 0.15},
}
"""Share of a fleet's machines at each kind of site."""


@dataclass(frozen=True, slots=True, eq=False)
class _Site:
    latency_s: float
    bytes_per_s: float
    outer_latency_s: float
    outer_bytes_per_s: float
    place: tuple[float, float]

    def link(self, other: _Site) -> tuple[float, float]:
        """Return (latency in s, bytes/s) of a link between a machine at this site and a machine at ``other``."""
        if other is self:
            return self.latency_s, self.bytes_per_s
        apart = float(np.hypot(self.place[0] - other.place[0], self.place[1] - other.place[1]))
        latency_s = self.outer_latency_s + other.outer_latency_s + _WIDEST_S * apart
        return latency_s, min(self.outer_bytes_per_s, other.outer_bytes_per_s)


def make_fleet(name: FleetName, machines: int, seed: int = 0) -> Topology:
    """Return a synthetic fleet. Equal arguments give equal fleets.

    Args:
        name: kind of the fleet.
        machines: number of machines in the fleet, 1 to `MOST_MACHINES`.
        seed: seed of all random draws.

    Raises:
        UserError: the number of machines is out of range.
    """
    if not 1 <= machines <= MOST_MACHINES:
        raise UserError(
            f"a fleet has 1 to {MOST_MACHINES:,} machines, not {machines:,}",
            hint="ask for a number in between",
        )
    draw = np.random.default_rng([seed, *name.encode()])
    placed = [
        (kind, site)
        for site_kind, count in zip(_FLEETS[name], _counts(_FLEETS[name].values(), machines), strict=True)
        for kind, site in _stand(site_kind, count, draw)
    ]
    joining = [placed[place] for place in draw.permutation(machines)]
    contributors = tuple(_contributor(index, kind, draw) for index, (kind, _) in enumerate(joining))
    sites = [site for _, site in joining]
    return Topology(contributors, tuple(_measured(sites, draw)))


def _counts(shares: Iterable[float], total: int) -> list[int]:
    """Divide ``total`` in proportion to ``shares``, by the largest remainder method."""
    exact = [share * total for share in shares]
    counts = [int(part) for part in exact]
    order = sorted(range(len(exact)), key=lambda place: (counts[place] - exact[place], place))
    for place in order[: total - sum(counts)]:
        counts[place] += 1
    return counts


def _stand(kind: _SiteKind, machines: int, draw: Generator) -> Iterator[tuple[_MachineKind, _Site]]:
    """Yield (kind of machine, site) of each machine at sites of one kind, site by site."""
    sorts, weights = zip(*kind.mix.items(), strict=True)
    centre = draw.random(2)
    left = machines
    while left > 0:
        size = min(left, int(draw.integers(kind.machines[0], kind.machines[1] + 1)))
        place = centre + kind.spread * (draw.random(2) - centre)
        site = _Site(
            latency_s=_between(kind.inner_latency_s, draw),
            bytes_per_s=_between(kind.inner_bytes_per_s, draw),
            outer_latency_s=_between(kind.outer_latency_s, draw),
            outer_bytes_per_s=_between(kind.outer_bytes_per_s, draw),
            place=(float(place[0]), float(place[1])),
        )
        for _ in range(size):
            yield sorts[int(draw.choice(len(sorts), p=weights))], site
        left -= size


def _contributor(index: int, kind: _MachineKind, draw: Generator) -> Contributor:
    speed = draw.uniform(*kind.teraflops) * draw.uniform(*_SUSTAINED) * 1e12
    device = Device(
        kind=kind.device,
        name=kind.name,
        memory_bytes=int(draw.uniform(*kind.memory_gib) * _GIB),
        flops_per_s={"float32": speed, "bfloat16": speed * kind.half_factor},
        memory_bytes_per_s=draw.uniform(*kind.memory_gb_per_s) * draw.uniform(*_SUSTAINED) * 1e9,
        overhead_s=_OVERHEAD_S[kind.device],
    )
    return Contributor(id=f"c{index:05d}", name=f"{kind.name} {index}", devices=(device,))


def _measured(sites: Sequence[_Site], draw: Generator) -> Iterator[Link]:
    """Yield the links that each machine measures when it joins."""
    for index, site in enumerate(sites):
        earlier = draw.choice(index, size=min(_PEERS, index), replace=False) if index else ()
        for target, other in ((HEAD, sites[0]), *((f"c{peer:05d}", sites[peer]) for peer in earlier)):
            latency_s, bytes_per_s = site.link(other)
            noise = np.exp(_NOISE * draw.standard_normal(2))
            yield Link(f"c{index:05d}", target, float(latency_s * noise[0]), float(bytes_per_s * noise[1]))


def _between(limits: tuple[float, float], draw: Generator) -> float:
    """Draw a number from the log-uniform distribution between the limits."""
    return float(np.exp(draw.uniform(np.log(limits[0]), np.log(limits[1]))))
