"""Answers about the cluster as a whole, and about one machine."""

from __future__ import annotations

from share_compute.lifecycle.work import BusyRecord
from share_compute.store.records import ContributorRecord, HeldRecord, MachineSummaryRecord
from share_compute_api.schemas.bodies import ResponseBody
from share_compute_api.schemas.utilization import UtilizationSample


class Island(ResponseBody):
    """Group of machines with similar links to each other."""

    id: str
    """Id of the island's machine that joined first."""
    machines: tuple[str, ...]
    """Ids of the machines, in the order they joined."""
    latency_s: float | None
    """One-way latency between two machines of the island; null for a single machine, or if no link was measured."""
    bytes_per_s: float | None


class IslandLink(ResponseBody):
    """Link between two islands."""

    one: str
    """Id of an island."""
    other: str
    """Id of another island."""
    latency_s: float
    """One-way latency."""
    bytes_per_s: float
    """Bandwidth; 0 if the islands cannot reach each other."""


class Islands(ResponseBody):
    """All islands, and the links between all pairs of them; for many islands, a spanning tree of the fastest links."""

    islands: tuple[Island, ...]
    links: tuple[IslandLink, ...]
    is_current: bool
    """Whether the islands are up to date. If false, the server is computing newer ones: ask again in some seconds."""
    is_assumed: bool
    """Whether no link was measured, so that all machines are assumed to be near each other."""


class ClusterView(ResponseBody):
    """Overview of all machines."""

    machines: list[MachineSummaryRecord]
    """Requested machines, in the order they joined. By default, machines gone for more than a day are omitted."""
    islands: Islands
    """Islands of the machines that are present and measured."""


class ContributorView(ContributorRecord):
    """A machine with its measurements and its current work."""

    owner: str | None = None
    """Label of the invite that the machine joined with; null if the invite has none."""
    held: HeldRecord | None = None
    """Job or deployment that the machine is leased to; null when the machine is free."""
    utilization: UtilizationSample | None = None
    """Measurement of the machine's agent in the last minute; null if nothing was reported."""


class BusyHistory(ResponseBody):
    """Measured utilization of a machine by training jobs, oldest first; times without a job have no value."""

    measured: list[BusyRecord]
