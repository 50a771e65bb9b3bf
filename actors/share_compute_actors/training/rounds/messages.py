"""Messages between the synchronizer and the coordinators of branches. All of them run on the head."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field, TypeAdapter

from share_compute.files.strict import StrictModel
from share_compute.synchronization.records import BranchRun


class RangeAddress(StrictModel):
    """The server of a range of the weights."""

    actor: str
    """Name of its actor."""
    machine: str
    """Contributor id of its machine."""
    name: str
    """Name of its machine, for display."""


class ContributionPart(StrictModel):
    """The part of a contribution for one range, on the machine of the range."""

    actor: str
    """Name of the actor that has the part."""
    machine: str
    """Contributor id of the machine."""
    digest: str
    size_bytes: int


class BranchReport(StrictModel):
    """Report of a branch that has finished a round. Its contribution is complete."""

    branch: int = Field(ge=0)
    start: int = Field(ge=1)
    """Number of the start of the branch that reports."""
    round: int = Field(ge=1)
    """The round, from 1: the number of merges that the weights included when it began, plus 1."""
    folder: Path | None = None
    """Folder of the contribution on the head; None if its parts are on the machines of ranges."""
    key: str = ""
    """Name of the contribution on the machines of ranges; empty if the head has it."""
    parts: tuple[ContributionPart, ...] = ()
    """Part of the contribution for each range."""
    fault: str = ""
    """Defect of the contribution that a machine with a range found; empty if there is none."""
    samples: int = Field(ge=1)
    """Number of samples on which the branch trained in the round."""
    loss: float | None
    """Mean loss of the round's steps; None if the log of steps lacks them."""
    seconds: float = Field(ge=0, allow_inf_nan=False)
    """Time that the steps took."""

    @property
    def run(self) -> BranchRun:
        """The branch and its round."""
        return BranchRun(self.round, self.branch)


class BranchUpdate(StrictModel):
    """The change of a branch's weights by one merge."""

    version: int
    """Version that the update makes."""
    before: int
    """Version of the weights to which the update is added."""
    folder: Path
    """Folder of the update on the head."""
    servers: tuple[RangeAddress, ...] = ()
    """Machines that have the update of each range as well; empty if only the head has it."""
    payloads: dict[str, tuple[int, str]] = Field(default_factory=dict)
    """Range and digest of the payload of each parameter, by stored name, for ``servers``."""


class BranchUpdates(StrictModel):
    """Answer of the synchronizer to a `BranchReport`."""

    base: int
    """Version of the weights with which the branch began its round."""
    updates: tuple[BranchUpdate, ...]
    """Updates from this version to the newest one, in order. The first one closes the round.

    Empty if the contribution came after the last merge.
    """
    is_over: bool
    """Whether all rounds are merged."""
    repeats: bool = False
    """Whether the contribution was lost: then the branch has to send it again, and to wait for another answer."""
    merged: Path | None = None
    """Folder of the merged weights, if the branch has other weights and evaluates the merged ones."""


servers_of_ranges: TypeAdapter[tuple[RangeAddress, ...]] = TypeAdapter(tuple[RangeAddress, ...])


@dataclass(slots=True)
class BranchMail:
    """Messages between the coordinator of a job and the coordinators of its branches. Thread-safe."""

    reports: queue.SimpleQueue[BranchReport] = field(default_factory=queue.SimpleQueue)
    """Reports that the synchronizer has not read."""
    servers: tuple[RangeAddress, ...] = ()
    """Server of each range of the weights; empty while one of them is missing, and if the head merges all."""
    accused: queue.SimpleQueue[tuple[str, str]] = field(default_factory=queue.SimpleQueue)
    """Actors with ranges that cannot store contributions, each with the reason."""
