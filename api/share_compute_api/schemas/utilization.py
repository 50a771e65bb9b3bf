"""Utilization of machines, as measured by their agents, now and over the last hour."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field

from share_compute.files.strict import StrictModel
from share_compute_api.schemas.bodies import ResponseBody

Fraction = Annotated[float, Field(ge=0, le=1)]
Size = Annotated[int, Field(ge=0, le=2**53)]
Celsius = Annotated[float, Field(ge=-50, le=200)]
BytesPerSecond = Annotated[float, Field(ge=0, le=1e15)]


class Utilization(StrictModel):
    """Utilization of one machine, as its agent measured it; null where the machine has no sensor."""

    cpu_fraction: Fraction | None = None
    """Used part of the lent CPU threads, from 0 to 1; only processes of the cluster count."""
    host_cpu_fraction: Fraction | None = None
    """Used part of all processors of the host, by any program."""
    memory_bytes: Size | None = None
    """Memory that the processes of the cluster hold on the machine."""
    gpu_fraction: Fraction | None = None
    """Part of the time in which the lent GPU computed, for any program."""
    gpu_memory_bytes: Size | None = None
    """Used memory of the lent GPU, of all programs."""
    gpu_total_bytes: Size | None = None
    """Memory of the lent GPU."""
    cpu_celsius: Celsius | None = None
    """Highest temperature of the processors."""
    gpu_celsius: Celsius | None = None
    received_bytes_per_s: BytesPerSecond | None = None
    """Rate at which the machine's network interface received, for all programs of the host."""
    sent_bytes_per_s: BytesPerSecond | None = None

    @property
    def busy_fraction(self) -> float | None:
        """Return the fraction in use of the lent GPU, or of the lent CPU threads if no GPU was measured."""
        return self.cpu_fraction if self.gpu_fraction is None else self.gpu_fraction


class UtilizationSample(Utilization):
    """Utilization at one moment: rates and fractions are means over the time since the sample before."""

    at: datetime


class MachineUtilization(ResponseBody):
    """Last utilization of a machine, and the busy part of its lent device over the last hour."""

    latest: UtilizationSample
    busy: tuple[float | None, ...]
    """Mean busy part of the lent GPU, or of the lent CPU threads, in each interval; null where nothing was measured.
    Oldest first; empty unless points were requested."""


class ClusterUtilization(ResponseBody):
    """Utilization of the machines that reported in the last minute, on one scale of time."""

    begin: datetime
    """Beginning of the first interval of ``busy``."""
    interval_s: float
    machines: dict[str, MachineUtilization]
    """Utilization by id of the machine."""


class UtilizationHistory(ResponseBody):
    """Utilization of one machine in the last hour."""

    begin: datetime
    """One hour ago."""
    end: datetime
    """Time of the answer."""
    samples: tuple[UtilizationSample, ...]
    """Oldest first. The server keeps them in memory, so a restart of the server deletes them."""
