"""Body of the route that returns the last rounds of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Self

from share_compute.lifecycle.attempt_events import BranchRound, RoundMerged
from share_compute.store.records import EventRecord
from share_compute_api.schemas.bodies import ResponseBody


class BranchView(ResponseBody):
    """One contribution of a branch to a merge."""

    number: int
    """Number of the branch, from 0."""
    round: int
    """The round of the contribution; less than that of the merge if it was late, or computed with older weights."""
    staleness: int
    """Merges that happened between the weights with which the branch began and this merge; 0 if it was in time."""
    machines: dict[str, str]
    """Names of the machines that trained the branch, by id."""
    loss: float | None
    """Mean loss of the round's steps; null if it is unknown."""
    samples: int
    seconds: float
    """Time in which the branch computed the steps of the round."""
    waited_s: float
    """Time from the report of the contribution to the merge; 0 if the branch trained on meanwhile."""
    other_s: float | None
    """Remaining time of the round, such as the exchange; null if it is unknown, or the contribution is late."""
    sent_bytes: int
    """Size of the contribution."""


class RoundView(ResponseBody):
    """One merge of a job whose branches train apart."""

    round: int
    """Number of the merge, from 1."""
    step: int
    """Number of steps that each branch has taken, except those that are late."""
    at: datetime
    """Time of the merge."""
    attempt: int | None
    elapsed_s: float | None
    """Time since the merge before in the same attempt; null for the first one."""
    branches: list[BranchView]
    """Merged contributions, in the order of the sum."""
    missing: list[int]
    """Branches without a contribution to this round; empty if branches push one after another."""
    update_bytes: int
    """Size of the update that each branch receives."""
    weight_bytes: int
    """Size of the trained weights in float32, for comparison."""
    compression_ratio: float | None
    """Bytes that contributions and updates would have in float32, divided by their bytes; null if nothing was sent."""
    consensus_distance: float | None
    """Distance of the branches' weights from the merged ones, relative to their norm; null with common weights."""
    merge_s: float
    """Time that the merge took."""


class RoundsView(ResponseBody):
    """Last rounds of a job."""

    rounds: list[RoundView]
    """The rounds, oldest first; empty before the first merge, and for jobs without rounds."""

    @classmethod
    def of(cls, events: Sequence[EventRecord], names: Mapping[str, str], *, merges_apart: bool) -> Self:
        """Return the rounds that events of kind ``round`` report.

        Args:
            events: events of a job, oldest first.
            names: names of machines by id.
            merges_apart: whether each contribution is merged alone, as soon as it arrives.
        """
        rounds: list[RoundView] = []
        before: EventRecord | None = None
        for event in events:
            merged = RoundMerged.model_validate(event.data)
            # If the newest weights are damaged, the next attempt merges their rounds again.
            while rounds and rounds[-1].round >= merged.round:
                rounds.pop()
            follows = before is not None and before.attempt == event.attempt
            elapsed_s = (event.at - before.at).total_seconds() if before is not None and follows else None
            branches = [
                _branch(branch, merged.round, names, None if merges_apart else elapsed_s)
                for branch in merged.branches
            ]
            rounds.append(
                RoundView(
                    round=merged.round,
                    step=merged.step,
                    at=event.at,
                    attempt=event.attempt,
                    elapsed_s=elapsed_s,
                    branches=branches,
                    missing=list(merged.missing),
                    update_bytes=merged.update_bytes,
                    weight_bytes=merged.weight_bytes,
                    compression_ratio=merged.compression_ratio,
                    consensus_distance=merged.consensus_distance,
                    merge_s=merged.merge_s,
                )
            )
            before = event
        return cls(rounds=rounds)


def _branch(branch: BranchRound, merge: int, names: Mapping[str, str], elapsed_s: float | None) -> BranchView:
    """Return the figures of a contribution; ``elapsed_s`` is the time of the round, None if it is unknown."""
    other_s = None
    if elapsed_s is not None and branch.round == merge:
        other_s = max(0.0, elapsed_s - branch.seconds - branch.waited_s)
    return BranchView(
        number=branch.number,
        round=branch.round,
        staleness=merge - branch.round,
        machines={machine: names.get(machine, machine) for machine in branch.machines},
        loss=branch.loss,
        samples=branch.samples,
        seconds=branch.seconds,
        waited_s=branch.waited_s,
        other_s=other_s,
        sent_bytes=branch.sent_bytes,
    )
