"""Answers about the pool as a whole, and about what one machine did."""

from __future__ import annotations

from share_compute.store.records import BusyRecord, ContributorRecord, GlanceRecord, HeldRecord
from share_compute_api.schemas import View


class Island(View):
    """Machines whose links are alike."""

    id: str
    """Id of the machine of it that joined first."""
    machines: tuple[str, ...]
    """Ids, in the order they joined."""
    latency_s: float | None
    """Between two of them, one way; null for one machine alone, or where no link was measured."""
    bytes_per_s: float | None


class IslandLink(View):
    """What is between two islands."""

    one: str
    """Id of an island."""
    other: str
    """Id of another."""
    latency_s: float
    """One way."""
    bytes_per_s: float
    """0 says that nothing gets through."""


class Islands(View):
    """All islands, and the links between them: all of them, or, of many islands, those by which all are joined."""

    islands: tuple[Island, ...]
    links: tuple[IslandLink, ...]
    is_current: bool
    """Whether this is so now; else it was so lately, and better is being worked out: ask again in some seconds."""
    is_assumed: bool
    """Whether no link was measured, so that all machines are taken to stand together."""


class PoolView(View):
    """The pool at a glance."""

    machines: list[GlanceRecord]
    """In the order they joined: those that were asked for, or all but those that are gone for more than a day."""
    islands: Islands
    """Of machines that were measured and are here."""


class ContributorView(ContributorRecord):
    """A machine with what was measured on it and what it does."""

    owner: str | None = None
    """For whom its invite was, where that was said."""
    held: HeldRecord | None = None
    """What it works for; null when it is free."""


class BusyHistory(View):
    """How busy training kept a machine, oldest first; there is nothing for times at which it had no step to compute."""

    measured: list[BusyRecord]
