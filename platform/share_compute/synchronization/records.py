"""Contributions of branches, and merge records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Branch: TypeAlias = int


class BranchRun(NamedTuple):
    """One round of one branch."""

    round: int
    branch: Branch


@dataclass(frozen=True, slots=True)
class Contribution:
    """The result of a run, without its tensors."""

    run: BranchRun
    weight: float
    """Number of samples or tokens."""
    digest: str
    """Digest of the tensors."""


@dataclass(frozen=True, slots=True)
class MergeTerm:
    """One summand of a merge."""

    contribution: Contribution
    coefficient: float
    """Factor of the contribution's tensors."""


@dataclass(frozen=True, slots=True)
class MergeRecord:
    """Entry of the durable log: which contributions are merged, in which order, with which factors."""

    version: int
    """Version that the merge makes; in gossip, of the weights of one branch."""
    terms: tuple[MergeTerm, ...]

    @property
    def runs(self) -> tuple[BranchRun, ...]:
        """The merged runs, in order."""
        return tuple(term.contribution.run for term in self.terms)


def age_scale(age: int) -> float:
    """Return the factor of a contribution that is merged ``age`` rounds too late: 1 / (1 + age).

    Source: the polynomial of FedAsync with exponent 1 (Xie et al. 2019, arXiv 1903.03934).
    """
    return 1.0 / (1.0 + age)


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
