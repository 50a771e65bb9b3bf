"""Chooses the layout with the shortest simulated step."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout
from share_compute.planning.cost.schedule_simulator import StepTimeline, simulate_step
from share_compute.planning.search.partitioning import Candidate


@dataclass(frozen=True, slots=True)
class Proposal:
    """A layout for one number of microbatches, with its step time by the cost formula."""

    cost: TrainingCost
    candidate: Candidate
    formula_s: float

    @property
    def preference(self) -> tuple[float, int, int]:
        """Sort key: fastest by the cost formula first; ties go to fewer machines, then to fewer microbatches."""
        return (
            rounded(self.formula_s),
            len(self.candidate.layout.machines),
            self.cost.workload.microbatches,
        )

    @property
    def floor_s(self) -> float:
        """Lower bound on the simulated step in seconds: the step by the cost formula minus the longest tail.

        In the simulation, gradient sums and backups may overlap with more work than in the cost formula.
        """
        return self.formula_s - max(map(self.cost.tail_s, self.candidate.layout.stages))

    @property
    def cells(self) -> int:
        """Number of cells in a simulated step: forwards and backwards of one microbatch in one stage."""
        return 2 * self.cost.workload.microbatches * len(self.candidate.layout.stages)


class _Rank(NamedTuple):
    """Sort key of simulated layouts: fastest first; ties go to fewer machines, then to fewer microbatches."""

    step_s: float
    machines: int
    microbatches: int
    formula_s: float
    layout: Layout


class Choice:
    """Chooses the proposal with the shortest simulated step among the proposals that are offered."""

    def __init__(self) -> None:
        self.proposals: list[Proposal] = []
        """All proposals that were offered, each once."""
        self.cells = 0
        """Number of cells simulated so far: a measure of the search effort, independent of the computer's speed."""
        self._known: set[tuple[int, Layout]] = set()
        self._ranked: list[tuple[_Rank, Proposal]] = []
        self._timeline: StepTimeline | None = None

    def __bool__(self) -> bool:
        return bool(self._ranked)

    @property
    def ranked(self) -> list[Proposal]:
        """All proposals that were simulated, the fastest first."""
        return [proposal for _, proposal in self._ranked]

    @property
    def best(self) -> tuple[Proposal, StepTimeline]:
        """The fastest proposal and its simulated step.

        Raises:
            LookupError: no proposal was simulated.
        """
        if self._timeline is None:
            raise LookupError("there are no candidates")
        return self._ranked[0][1], self._timeline

    @property
    def step_s(self) -> float:
        """Simulated step time of the fastest proposal, in seconds."""
        return self.best[1].step_s

    def offer(self, proposals: Iterable[Proposal], *, most_cells: float = float("inf")) -> None:
        """Simulate proposals that may be faster than the best so far, in the order of their preference.

        Args:
            proposals: proposals in any order; proposals that were offered before are skipped.
            most_cells: number of simulated cells after which this call begins no further simulation.
        """
        until = self.cells + most_cells
        for proposal in sorted(proposals, key=lambda each: (each.preference, each.candidate.layout)):
            key = proposal.cost.workload.microbatches, proposal.candidate.layout
            if key in self._known:
                continue
            self._known.add(key)
            self.proposals.append(proposal)
            if self.cells < until and not self._ruled_out(proposal):
                self._simulate(proposal)

    def _ruled_out(self, proposal: Proposal) -> bool:
        return bool(self._ranked) and rounded(proposal.floor_s) > self._ranked[0][0].step_s

    def _simulate(self, proposal: Proposal) -> None:
        timeline = simulate_step(proposal.cost, proposal.candidate.layout)
        self.cells += proposal.cells
        formula_s, machines, microbatches = proposal.preference
        rank = _Rank(rounded(timeline.step_s), machines, microbatches, formula_s, proposal.candidate.layout)
        insort(self._ranked, (rank, proposal), key=itemgetter(0))
        if self._ranked[0][0] == rank:
            self._timeline = timeline


def least_penalized(proposals: Sequence[Proposal]) -> list[Proposal]:
    """Return the proposals of one strategy with the smallest penalty; all of them if the strategy has none."""
    least = min((proposal.candidate.penalty for proposal in proposals), default=())
    return [proposal for proposal in proposals if proposal.candidate.penalty == least]


def rounded(seconds: float) -> float:
    """Return seconds rounded to ten significant digits, so that rounding errors do not affect the ranking."""
    return float(f"{seconds:.9e}")
