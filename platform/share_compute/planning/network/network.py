"""Links between all machines, by region: all machines of one region have the same links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """All links of a topology, by region. The diagonal holds links inside a region. A dead link has 0 bytes/s."""

    region: NDArray[np.int64]
    """Region of each machine ``[machines]``, numbered from 0."""
    latency_s: Floats
    """Latency one way, in seconds, ``[regions, regions]``, symmetric."""
    bytes_per_s: Floats
    """Bandwidth ``[regions, regions]``, symmetric."""
    assumed: bool = False
    """Whether no link was measured, so that all values are assumptions; False for a single machine."""

    @classmethod
    def alike(cls, machines: int) -> Self:
        """Return a network with the same fast link between all machines: 1 ms and 1 GB/s."""
        region = np.zeros(machines, dtype=np.int64)
        return cls(region=region, latency_s=np.full((1, 1), 1e-3), bytes_per_s=np.full((1, 1), 1e9))

    def transfer_s(self, source: int, target: int, size_bytes: float) -> float:
        """Return the seconds that a tensor takes from one machine to another; infinite on a dead link."""
        return transfer_s(*self.link(source, target), size_bytes)

    def link(self, source: int, target: int) -> tuple[float, float]:
        """Return (latency in s, bytes/s) of the link from one machine to another."""
        return self.between(int(self.region[source]), int(self.region[target]))

    def between(self, here: int, there: int) -> tuple[float, float]:
        """Return (latency in s, bytes/s) of the links between two regions, or inside one region."""
        return float(self.latency_s[here, there]), float(self.bytes_per_s[here, there])


def transfer_s(latency_s: float, bytes_per_s: float, size_bytes: float) -> float:
    """Return latency + size / bandwidth in seconds; infinite on a dead link."""
    return latency_s + size_bytes / bytes_per_s if bytes_per_s > 0 else float("inf")
