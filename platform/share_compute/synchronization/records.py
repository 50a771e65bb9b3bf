"""Contributions of branches, and merge records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from share_compute.specification.synchronization import BranchesSpec, ElasticSpec

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
    """Entry of the durable log: the contributions of a merge, with their order and factors."""

    version: int
    """Version that the merge makes."""
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


def coefficients(
    policy: BranchesSpec, contributions: Sequence[Contribution], version: int
) -> Sequence[float]:
    """Return the factors of contributions in a merge, in the given order.

    - If branches merge together, the factors are those of a weighted mean. Gossip does not use them.
    - In elastic averaging (EASGD), they are the fractions of their differences by which branches pull the centre.
    - Branches that push one after another to a parameter server each add an equal part of their change. A round of all
      branches then moves the weights as far as one common merge would.

    Args:
        policy: options of the policy.
        contributions: contributions of one merge.
        version: version that the merge makes. Contributions to earlier rounds are scaled by their age, except those to
            a parameter server, where branches are always behind.
    """
    ages = [age_scale(version - each.run.round) for each in contributions]
    if isinstance(policy, ElasticSpec):
        return [policy.rate * age for age in ages]
    if policy.merges_apart:
        return [1.0 / policy.branches] * len(contributions)
    weights = [each.weight * age for each, age in zip(contributions, ages, strict=True)]
    total = sum(weights)
    return [weight / total for weight in weights]
