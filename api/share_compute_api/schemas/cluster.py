"""Answers about the cluster as a whole, and about the work of one machine."""

from __future__ import annotations

from share_compute.store.records import BusyRecord, ContributorRecord, HeldRecord, MachineSummaryRecord
from share_compute_api.schemas.bodies import ResponseBody


class Island(ResponseBody):
    """Group of machines with similar links."""

    id: str
    """Id of the island's machine that joined first."""
    machines: tuple[str, ...]
    """Ids of the machines, in the order they joined."""
    latency_s: float | None
    """One-way latency between two of the machines; null for a single machine, or if no link was measured."""
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
    """Bandwidth; 0 means that nothing gets through."""


class Islands(ResponseBody):
    """All islands and their links: each pair, or, with many islands, a spanning tree of the best links."""

    islands: tuple[Island, ...]
    links: tuple[IslandLink, ...]
    is_current: bool
    """Whether the islands are up to date; if false, newer ones follow: ask again in some seconds."""
    is_assumed: bool
    """Whether no link was measured, so that all machines are assumed to be near each other."""


class ClusterView(ResponseBody):
    """Overview of all machines."""

    machines: list[MachineSummaryRecord]
    """Machines in the order they joined: the requested ones, or all but those gone for more than a day."""
    islands: Islands
    """Islands of the machines that are present and measured."""


class ContributorView(ContributorRecord):
    """A machine with its measurements and its present work."""

    owner: str | None = None
    """Label of the invite that it joined with; null if the invite has none."""
    held: HeldRecord | None = None
    """Job or deployment that it works for; null when it is free."""


class BusyHistory(ResponseBody):
    """Share of time in which training kept a machine busy, oldest first; times without a step are left out."""

    measured: list[BusyRecord]
