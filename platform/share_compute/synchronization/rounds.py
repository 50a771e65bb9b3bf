"""The state machine of rounds: it decides which contributions each merge contains, and when a merge happens.

A merge depends on its record alone: not on the machines that ran the branches, nor on the order of messages.

- If the quorum is all branches, each record has all of them, so losses of machines do not change the weights.
- With a smaller quorum, the grace period begins when the quorum is there. Branches that are missing when it ends are
  late: their contributions go into the next merge, scaled by their age, or are dropped.

Sources: local SGD (Stich 2018, arXiv 1805.09767); DiLoCo (Douillard et al. 2023, arXiv 2311.08105); SparseLoCo (Sarfi
et al. 2025, arXiv 2508.15706); quorum and grace period as in Decoupled DiLoCo (arXiv 2604.21428).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from share_compute.specification.synchronization import LocalSpec
from share_compute.synchronization.records import (
    BranchRun,
    Contribution,
    MergeRecord,
    MergeTerm,
    mean_coefficients,
)


@dataclass(frozen=True, slots=True)
class Contributed:
    """A contribution is complete and was checked: shapes, types, finite numbers."""

    contribution: Contribution


@dataclass(frozen=True, slots=True)
class TimeRead:
    """The caller's monotonic clock shows this time. Earlier times than before are ignored."""

    now_s: float


@dataclass(frozen=True, slots=True)
class MergeRecorded:
    """The answer to `RecordMerge`: the merge was computed, and its record is stored."""

    record: MergeRecord


RoundEvent = Contributed | TimeRead | MergeRecorded


@dataclass(frozen=True, slots=True)
class RecordMerge:
    """Compute a merge and store its record in the durable log. This is the commit point."""

    record: MergeRecord


@dataclass(frozen=True, slots=True)
class ContributionIgnored:
    """A contribution has no effect."""

    run: BranchRun
    reason: str
    """Human-readable reason."""


RoundEffect = RecordMerge | ContributionIgnored


class RoundsMachine:
    """Decides on the merges of one job.

    Args:
        spec: options of the policy.
        rounds: number of rounds of the job.
        version: number of merges that are recorded.
        merged: runs whose contributions earlier merges contain.
    """

    def __init__(
        self, spec: LocalSpec, rounds: int, version: int = 0, merged: Iterable[BranchRun] = ()
    ) -> None:
        self._spec = spec
        self._rounds = rounds
        self.version = version
        """Number of merges that are recorded."""
        self._merged = set(merged)
        self._waiting: dict[BranchRun, Contribution] = {}
        """Contributions for the next merge, late ones as well."""
        self._record: MergeRecord | None = None
        """Record that is being stored; None if there is none."""
        self._now_s = 0.0
        self._quorum_s: float | None = None
        """Time at which the open round had its quorum; None before that."""

    @property
    def open_round(self) -> int:
        """The first round that is not merged."""
        return self.version + 1

    @property
    def is_over(self) -> bool:
        """Whether all rounds are merged."""
        return self.version >= self._rounds

    def missing(self, there: Iterable[BranchRun]) -> tuple[int, ...]:
        """Return the branches without a run of the open round among these runs."""
        present = {run.branch for run in there if run.round == self.open_round}
        return tuple(branch for branch in range(self._spec.branches) if branch not in present)

    def has(self, run: BranchRun) -> bool:
        """Return whether a run's contribution waits for a merge, or is merged."""
        is_recording = self._record is not None and run in self._record.runs
        return is_recording or run in self._waiting or run in self._merged

    def handle(self, event: RoundEvent) -> list[RoundEffect]:
        """Process one event, and return the effects to carry out."""
        match event:
            case Contributed():
                return self._on_contributed(event.contribution)
            case TimeRead():
                self._now_s = max(self._now_s, event.now_s)
                return self._merge_if_due()
            case MergeRecorded():
                return self._on_recorded(event.record)

    def _on_contributed(self, contribution: Contribution) -> list[RoundEffect]:
        refusal = self._refusal(contribution)
        if refusal:
            return [ContributionIgnored(contribution.run, refusal)]
        self._waiting[contribution.run] = contribution
        return self._merge_if_due()

    def _refusal(self, contribution: Contribution) -> str:
        """Return the reason why a contribution is ignored; empty if it is used."""
        run = contribution.run
        is_late = run.round < self.open_round or self._record is not None
        refusals = {
            "the last round is merged": self.is_over,
            f"branch {run.branch} is unknown": not 0 <= run.branch < self._spec.branches,
            f"round {self.open_round} is open": not 1 <= run.round <= self.open_round,
            f"its weight is {contribution.weight}": not 0 < contribution.weight < inf,
            "it is a duplicate": self.has(run),
            "it is late": is_late and self._spec.late == "drop",
        }
        return next((reason for reason, applies in refusals.items() if applies), "")

    def _merge_if_due(self) -> list[RoundEffect]:
        """Close the round if all branches are there, or if the grace period after the quorum is over."""
        if self._record is not None or self.is_over:
            return []
        there = self._spec.branches - len(self.missing(self._waiting))
        if there >= self._spec.needed and self._quorum_s is None:
            self._quorum_s = self._now_s
        is_over = self._quorum_s is not None and self._now_s >= self._quorum_s + self._spec.grace_s
        if there < self._spec.branches and not is_over:
            return []
        contributions = [self._waiting[run] for run in sorted(self._waiting)]
        coefficients = mean_coefficients(contributions, self.open_round)
        terms = zip(contributions, coefficients, strict=True)
        self._record = MergeRecord(self.open_round, tuple(MergeTerm(*term) for term in terms))
        self._waiting.clear()
        return [RecordMerge(self._record)]

    def _on_recorded(self, record: MergeRecord) -> list[RoundEffect]:
        if record != self._record:
            return []
        self._merged.update(record.runs)
        self.version, self._record, self._quorum_s = record.version, None, None
        return self._merge_if_due()
