"""The choice among layouts: what they take is simulated, but for those that the formula rules out."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from share_compute.planning.cost import TrainingCost
from share_compute.planning.layout import Layout
from share_compute.planning.partitioning import Candidate
from share_compute.planning.schedule_simulator import StepTimeline, simulate_step


@dataclass(frozen=True, slots=True)
class Proposal:
    """A layout at one number of microbatches, that fits and that links can serve."""

    cost: TrainingCost
    candidate: Candidate
    formula_s: float

    @property
    def preference(self) -> tuple[float, int, int]:
        """Sorts the fastest first; of equals, the one with fewer machines and larger microbatches."""
        return (
            rounded(self.formula_s),
            len(self.candidate.layout.machines),
            self.cost.workload.microbatches,
        )

    @property
    def floor_s(self) -> float:
        """No simulation is faster: the formula, but for gradient sums that may hide where it does not hide them."""
        return self.formula_s - max(map(self.cost.tail_s, self.candidate.layout.pools))

    @property
    def cells(self) -> int:
        """What a simulation has to lay out: it takes time in proportion."""
        return 2 * self.cost.workload.microbatches * len(self.candidate.layout.pools)


class _Rank(NamedTuple):
    """Sorts the fastest first; of equals, the one with fewer machines and larger microbatches."""

    step_s: float
    machines: int
    microbatches: int
    formula_s: float
    layout: Layout


class Choice:
    """The proposal with the shortest simulated step of all that were offered."""

    def __init__(self) -> None:
        self.proposals: list[Proposal] = []
        """All that were offered, each once."""
        self.cells = 0
        """Simulated so far: what the choice has cost, on any computer."""
        self._known: set[tuple[int, Layout]] = set()
        self._ranked: list[tuple[_Rank, Proposal]] = []
        self._timeline: StepTimeline | None = None

    def __bool__(self) -> bool:
        return bool(self._ranked)

    @property
    def ranked(self) -> list[Proposal]:
        """All that were simulated, the fastest first."""
        return [proposal for _, proposal in self._ranked]

    @property
    def best(self) -> tuple[Proposal, StepTimeline]:
        """The fastest, and its step.

        Raises:
            LookupError: nothing was offered.
        """
        if self._timeline is None:
            raise LookupError("nothing was offered")
        return self._ranked[0][1], self._timeline

    @property
    def step_s(self) -> float:
        """The simulated step of the fastest."""
        return self.best[1].step_s

    def offer(self, proposals: Iterable[Proposal], *, most_cells: float = float("inf")) -> None:
        """Simulate proposals, those that look best first, as long as they may be faster than the best so far.

        Args:
            proposals: in any order; those that were offered before are passed over.
            most_cells: begin no more simulations when so much was laid out.
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


def rounded(seconds: float) -> float:
    """Return seconds to nine digits, so that the last bits of a sum decide nothing."""
    return float(f"{seconds:.9e}")
