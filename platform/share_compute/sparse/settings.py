"""Settings of a sparse model, from which workers and servers build the same model and rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from share_compute.sparse.messages import FilterOptions, ValueType
from share_compute.sparse.models import FactorizationMachine, Logistic, MatrixFactorization, SparseModel
from share_compute.sparse.rules import (
    AdaGradRows,
    FactorizationRule,
    FollowTheLeader,
    TopicRule,
    UpdateRule,
)
from share_compute.sparse.topics import TopicModel

SparseModelName = Literal["logistic", "factorization_machine", "matrix_factorization", "topics"]


@dataclass(frozen=True, slots=True)
class SparseSettings:
    """Common settings of the workers and servers of a job."""

    model: SparseModelName
    workers: int
    """Number of workers, each of which has a part of the rows."""
    ranges: int
    """Number of ranges into which the places are divided."""
    passes: int = 1
    batch_size: int = 1024
    staleness: int | None = 0
    """Number of clocks that a worker may be ahead of the slowest one; None for no bound."""
    seed: int = 0
    learning_rate: float = 0.1
    l1: float = 0.0
    l2: float = 0.0
    factors: int = 8
    """Factors of a row, or topics."""
    scale: float = 0.1
    """Standard deviation of the first factors."""
    mean: float = 0.0
    """Mean rating, for matrix factorisation."""
    documents: int = 1
    """Number of documents, for topics."""
    alpha: float = 0.1
    eta: float = 0.1
    threshold: float = 0.0
    """Rows of pushes that are held back; see `FilterOptions`."""
    value_type: ValueType = "float32"
    caches_keys: bool = True
    """Whether lists of keys are sent once only."""
    validation_fraction: float = 0.0
    """Fraction of the rows that is held out for measurements; see `held_out`."""

    @property
    def has_bias(self) -> bool:
        """Whether the model has a bias in its own row."""
        return self.model in ("logistic", "factorization_machine")

    @property
    def filter(self) -> FilterOptions:
        """Filter of pushes."""
        return FilterOptions(self.threshold, self.value_type)

    def build_model(self) -> SparseModel:
        """Return the model."""
        match self.model:
            case "logistic":
                return Logistic()
            case "factorization_machine":
                return FactorizationMachine(self.factors, l2=self.l2)
            case "matrix_factorization":
                return MatrixFactorization(self.factors, self.mean, self.l2)
            case "topics":
                return TopicModel(self.factors, self.alpha, self.eta)

    def build_rule(self) -> UpdateRule:
        """Return the rule of the rows."""
        linear = FollowTheLeader(self.learning_rate, l1=self.l1, l2=self.l2)
        rows = AdaGradRows(1 + self.factors, self.learning_rate, self.seed, self.scale)
        match self.model:
            case "logistic":
                return linear
            case "factorization_machine":
                return FactorizationRule(linear, rows)
            case "matrix_factorization":
                return rows
            case "topics":
                return TopicRule(self.factors, self.documents, self.seed)
