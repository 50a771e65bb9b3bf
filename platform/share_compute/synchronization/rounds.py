"""The state machine of rounds: it decides which contributions each merge contains, and when a merge happens.

A merge depends only on its record, and not on the machines that ran the branches or on the order of messages.

- If the quorum is all branches, each record contains all branches, so losses of machines do not change the weights.
- With a smaller quorum, a grace period begins when the quorum is reached. Branches that are missing at its end are
  late. Local steps and a synchronous parameter server merge their contributions in the next merge, scaled by their age,
  or drop them. In elastic averaging and gossip, a late contribution counts for the open round.
- To a parameter server with staleness, each contribution is merged as soon as it arrives. A branch that is too far
  ahead of the slowest one waits before it continues.

Sources: local SGD (Stich 2018, arXiv 1805.09767); DiLoCo (Douillard et al. 2023, arXiv 2311.08105); SparseLoCo (Sarfi
et al. 2025, arXiv 2508.15706); quorum and grace period as in Decoupled DiLoCo (arXiv 2604.21428); synchronous SGD that
does not wait for the slowest workers (Chen et al. 2016, arXiv 1604.00981); bounded staleness (Ho et al. 2013, NeurIPS).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from share_compute.specification.synchronization import BranchesSpec, ParameterServerSpec
from share_compute.synchronization.records import (
    BranchRun,
    Contribution,
    MergeRecord,
    MergeTerm,
    coefficients,
)


@dataclass(frozen=True, slots=True)
class Contributed:
    """A contribution is complete and has passed the checks: shapes, types, finite numbers."""

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
        policy: options of the policy.
        rounds: number of rounds of the job.
        records: records of the merges so far, in order.
    """

    def __init__(self, policy: BranchesSpec, rounds: int, records: Iterable[MergeRecord] = ()) -> None:
        self._policy = policy
        self._rounds = rounds
        self.version = 0
        """Number of merges that are recorded."""
        self._merged: dict[BranchRun, int] = {}
        """Version that contains each merged run."""
        self._clocks: Counter[int] = Counter()
        """Number of merged runs of each branch."""
        for record in records:
            self._count(record)
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
        return self.rounds_done >= self._rounds

    @property
    def _slowest(self) -> int:
        return min(self.clock(branch) for branch in range(self._policy.branches))

    @property
    def rounds_done(self) -> int:
        """Number of rounds that all branches except late ones have finished."""
        return self._slowest if self._policy.merges_apart else self.version

    def rounds_with(self, record: MergeRecord) -> int:
        """Return `rounds_done` after a merge that is being recorded."""
        if not self._policy.merges_apart:
            return record.version
        pushed = Counter(run.branch for run in record.runs)
        return min(self.clock(branch) + pushed[branch] for branch in range(self._policy.branches))

    def last_round(self, branch: int) -> int:
        """Return the round of a branch's last merged run; 0 if there is none."""
        return max((run.round for run in self._merged if run.branch == branch), default=0)

    def clock(self, branch: int) -> int:
        """Return the number of runs of a branch that are merged."""
        return self._clocks[branch]

    def is_done(self, branch: int) -> bool:
        """Return whether a branch has finished all rounds; it may still wait for other branches."""
        return self.is_over or self.clock(branch) >= self._rounds

    def missing(self, there: Iterable[BranchRun]) -> tuple[int, ...]:
        """Return the branches that have no run for the open round among these runs."""
        counts_late = not self._policy.skips_missed
        present = {run.branch for run in there if run.round == self.open_round or counts_late}
        return tuple(branch for branch in range(self._policy.branches) if branch not in present)

    def has(self, run: BranchRun) -> bool:
        """Return whether a run's contribution is merged, or waits for a merge."""
        is_recording = self._record is not None and run in self._record.runs
        return is_recording or run in self._waiting or run in self._merged

    def withdraw(self, branch: int) -> list[BranchRun]:
        """Forget the contributions of a branch that wait for a merge, and return their runs.

        Call this when the branch restarts a round from another state, because it might then compute another
        contribution. Late contributions are kept if the branch skips their rounds, as with local steps.
        """
        withdrawn = [run for run in self._waiting if run.branch == branch and self._is_computed_again(run)]
        for run in withdrawn:
            del self._waiting[run]
        return withdrawn

    def _is_computed_again(self, run: BranchRun) -> bool:
        return not self._policy.skips_missed or run.round >= self.open_round

    def may_forget(self, run: BranchRun) -> bool:
        """Return whether a branch that restarts a round recomputes this contribution, which did not arrive."""
        return not self.has(run) and self._is_computed_again(run)

    def restart_round(self) -> list[BranchRun]:
        """Forget all contributions that are not merged, also those of the merge being recorded; return their runs."""
        being_merged = () if self._record is None else self._record.runs
        forgotten = [*being_merged, *self._waiting]
        self._waiting.clear()
        self._record, self._quorum_s = None, None
        return forgotten

    def updates(self, run: BranchRun) -> range | None:
        """Return the versions whose updates a branch needs to continue after a run; None if the branch must wait.

        Args:
            run: the last run of the branch, merged or not.
        """
        policy = self._policy
        if policy.skips_missed:
            return range(run.round, self.version + 1) if run.round <= self.version else None
        merged = self._merged.get(run)
        if merged is None:
            return None
        if policy.keeps_own_weights:
            return range(merged, merged + 1)
        return None if self.has_to_wait(run.branch) else range(run.round, self.version + 1)

    def has_to_wait(self, branch: int) -> bool:
        """Return whether a branch may not begin a round: it has none left, or is too far ahead of the slowest branch.

        A branch whose push is being merged also waits: if it restarted before the end of this merge, it would train the
        same round twice. When the job is over, no branch waits.
        """
        if self.is_over:
            return False
        return self.is_done(branch) or self._is_too_far_ahead(branch) or self._is_pushing(branch)

    def _is_pushing(self, branch: int) -> bool:
        """Return whether the merge being recorded contains a push of a branch, in policies that merge apart."""
        runs = () if self._record is None else self._record.runs
        return self._policy.merges_apart and any(run.branch == branch for run in runs)

    def _is_too_far_ahead(self, branch: int) -> bool:
        policy = self._policy
        if not isinstance(policy, ParameterServerSpec) or policy.staleness == "unbounded":
            return False
        # With staleness 0, branches merge together, and the quorum decides which branches a round waits for.
        return policy.staleness > 0 and self.clock(branch) - self._slowest > policy.staleness

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
        run, policy = contribution.run, self._policy
        is_late = run.round < self.open_round or self._record is not None
        refusals = {
            "the last round is merged": self.is_over,
            f"branch {run.branch} is unknown": not 0 <= run.branch < policy.branches,
            f"round {self.open_round} is open": not 1 <= run.round <= self.open_round,
            f"its weight is {contribution.weight}": not 0 < contribution.weight < inf,
            "it is a duplicate": self.has(run),
            "it is late": is_late and policy.drops_late,
        }
        return next((reason for reason, applies in refusals.items() if applies), "")

    def _merge_if_due(self) -> list[RoundEffect]:
        """Close the round if all contributions arrived, or if the grace period after the quorum is over."""
        if self._record is not None or self.is_over:
            return []
        policy = self._policy
        missing = self.missing(self._waiting)
        there = policy.branches - len(missing)
        if policy.keeps_own_weights and self.open_round == self._rounds and 0 in missing:
            return []  # the first branch saves the result, so the last merge must give the result to this branch
        if there < policy.needed:
            self._quorum_s = None
            return []
        if self._quorum_s is None:
            self._quorum_s = self._now_s
        if missing and self._now_s < self._quorum_s + policy.patience_s:
            return []
        contributions = [self._waiting[run] for run in sorted(self._waiting)]
        factors = coefficients(policy, contributions, self.open_round)
        terms = zip(contributions, factors, strict=True)
        self._record = MergeRecord(self.open_round, tuple(MergeTerm(*term) for term in terms))
        self._waiting.clear()
        return [RecordMerge(self._record)]

    def _on_recorded(self, record: MergeRecord) -> list[RoundEffect]:
        if record != self._record:
            return []
        self._count(record)
        self._record, self._quorum_s = None, None
        return self._merge_if_due()

    def _count(self, record: MergeRecord) -> None:
        self.version = record.version
        self._merged |= dict.fromkeys(record.runs, record.version)
        self._clocks.update(run.branch for run in record.runs)
