"""Messages between the synchronizer and the coordinators of branches. All of them run on the head."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from share_compute.files.strict import StrictModel
from share_compute.synchronization.records import BranchRun


class BranchReport(StrictModel):
    """Report of a branch that has finished a round. Its contribution is in a folder on the head."""

    branch: int = Field(ge=0)
    start: int = Field(ge=1)
    """Number of the start of the branch that reports."""
    round: int = Field(ge=1)
    """The round, from 1: the number of merges that the weights included when it began, plus 1."""
    folder: Path
    """Folder of the contribution."""
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
    merged: Path | None = None
    """Folder of the merged weights, if the branch has other weights and evaluates the merged ones."""
