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
    def device(self) -> Device:
        """The device that a member works on: its fastest."""
        return max(
            self.devices,
            key=lambda device: (device.kind == "cuda", max(device.flops_per_s.values(), default=0.0)),
        )

    @property
    def memory_bytes(self) -> int:
        """Memory of the device that a member works on."""
        return self.device.memory_bytes if self.devices else 0

    def flops_per_s(self, dtype: str = "float32") -> float:
        """Measured speed of the device that a member works on, 0.0 where none was measured."""
        return self.device.flops_per_s.get(dtype, 0.0) if self.devices else 0.0


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
