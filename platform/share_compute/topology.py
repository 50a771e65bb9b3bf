"""All contributors with their capacity and links, at one moment: measured, not declared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Device:
    """One thing that computes, as the probe measured it."""

    kind: DeviceKind
    name: str
    memory_bytes: int
    """Memory that its owner lends."""
    flops_per_s: dict[str, float] = field(default_factory=dict)
    """Dense matrix product, by dtype name: ``{"float32": 5.1e10}``."""
    memory_bytes_per_s: float = 0.0
    """Memory bandwidth of a copy, read plus write."""


@dataclass(frozen=True, slots=True)
class Link:
    """Measured path from one contributor (or the head) to another."""

    source: str
    """Contributor id, or ``head``."""
    target: str
    """Contributor id, or ``head``."""
    latency_s: float
    """One small message there and back, halved."""
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Contributor:
    """One machine that joined, as the planner sees it."""

    id: str
    name: str
    devices: tuple[Device, ...]
    cpu_threads: int = 1
    """Threads that its owner lends to torch."""
    node_id: str = ""
    """Ray node, in hexadecimal."""
    address: str = ""
    """IP address that other members reach it at."""

    @property
    def memory_bytes(self) -> int:
        """Memory of all its devices together."""
        return sum(device.memory_bytes for device in self.devices)

    def flops_per_s(self, dtype: str = "float32") -> float:
        """Measured speed of all its devices together, 0.0 where none was measured."""
        return sum(device.flops_per_s.get(dtype, 0.0) for device in self.devices)


@dataclass(frozen=True, slots=True)
class Topology:
    """All contributors and the links between them, at one moment."""

    contributors: tuple[Contributor, ...]
    links: tuple[Link, ...] = ()
    """Only sampled pairs are present."""

    def __getitem__(self, contributor_id: str) -> Contributor:
        """Return one contributor by id; KeyError when it is not there."""
        for contributor in self.contributors:
            if contributor.id == contributor_id:
                return contributor
        raise KeyError(contributor_id)
