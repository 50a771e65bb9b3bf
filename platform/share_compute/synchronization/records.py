"""Contributions of branches, and merge records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple, TypeAlias

IslandName: TypeAlias = str
ServerName: TypeAlias = str
Branch: TypeAlias = int


class BranchRun(NamedTuple):
    """One execution of one round of a branch."""

    round: int
    branch: Branch
    attempt: int = 1
    """Number that grows each time that an island is asked to run the branch."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """The result of a run, without its tensors."""

    run: BranchRun
    weight: float
    """Number of samples or tokens."""
    digest: str
    """Digest of the tensors."""
    reads: tuple[int, ...] = ()
    """Version that the run read of each range (parameter server); else empty, because the round says which version."""

    @property
    def has_valid_weight(self) -> bool:
        """Whether the weight can be part of a mean."""
        return isfinite(self.weight) and self.weight > 0


@dataclass(frozen=True, slots=True)
class StateRestart:
    """A branch did not begin a run with its own state, because no island had it any more."""

    source: Branch | None = None
    """Branch whose state it took over (gossip); None if it began with an empty state and the weights of the round."""
    source_round: int = 0
    """Last round that the state of ``source`` contains."""


@dataclass(frozen=True, slots=True)
class MergeTerm:
    """One summand of a merge."""

    contribution: Contribution
    coefficient: float
    """Factor of the contribution's tensors."""
    restart: StateRestart | None = None
    """Set if the run did not begin with the state of its branch."""


@dataclass(frozen=True, slots=True)
class MergeRecord:
    """Entry of the durable log: which contributions are merged, in which order, with which factors."""

    version: int
    """Version that the merge makes; in gossip, of the weights of one branch."""
    terms: tuple[MergeTerm, ...]
    branch: Branch | None = None
    """Branch whose weights change (gossip); None if the common weights change."""
    restart: StateRestart | None = None
    """Set if ``branch`` did not begin its run with its own state (gossip)."""

    @property
    def runs(self) -> tuple[BranchRun, ...]:
        """The merged runs, in order."""
        return tuple(term.contribution.run for term in self.terms)


def age_scale(age: int) -> float:
    """Return the factor of a contribution that is merged ``age`` rounds too late: 1 / (1 + age).

    Source: the polynomial of FedAsync with exponent 1 (Xie et al. 2019, arXiv 1903.03934).
    """
    return 1.0 / (1.0 + age)


def in_order(contributions: Iterable[Contribution]) -> list[Contribution]:
    """Return contributions in the order in which they are added: by round, then by branch."""
    return sorted(contributions, key=lambda contribution: contribution.run)


def mean_coefficients(contributions: Iterable[Contribution], version: int) -> list[float]:
    """Return the factors of a weighted mean, in the given order.

    Args:
        contributions: contributions of one merge.
        version: version that the merge makes; earlier rounds are scaled by their age.
    """
    weights = [each.weight * age_scale(version - each.run.round) for each in contributions]
    total = sum(weights)
    return [weight / total for weight in weights]


def elastic_coefficients(contributions: Iterable[Contribution], version: int, rate: float) -> list[float]:
    """Return the fractions of their differences by which branches pull the centre (EASGD), in the given order."""
    return [rate * age_scale(version - each.run.round) for each in contributions]
