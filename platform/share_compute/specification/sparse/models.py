"""Sparse models that jobs can train, with their options."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field

from share_compute.specification.base import SpecModel, known_tag

SPARSE_MODELS: Final = (
    "logistic",
    "factorization_machine",
    "matrix_factorization",
    "lda",
    "ridge",
    "svm",
)
Strength: TypeAlias = Annotated[float, Field(ge=0, le=1e6)]
_MOST_FACTORS = 1024


class LogisticSpec(SpecModel):
    """Logistic regression for two classes, by FTRL-Proximal."""

    name: Literal["logistic"] = "logistic"
    """Name of the sparse model."""
    l1: Strength = 0.0
    """Strength of L1 regularisation for each row of data: larger values set more weights to exactly 0."""
    l2: Strength = 0.0
    """Strength of L2 regularisation for each row of data."""


class FactorizationMachineSpec(SpecModel):
    """Factorisation machine of degree 2 for two classes, by FTRL-Proximal and AdaGrad."""

    name: Literal["factorization_machine"] = "factorization_machine"
    """Name of the sparse model."""
    factors: int = Field(default=8, ge=1, le=_MOST_FACTORS)
    """Numbers in the vector of each feature, user or item."""
    initial_deviation: float = Field(default=0.1, gt=0, le=100)
    """Standard deviation of the first vectors."""
    l1: Strength = 0.0
    """Strength of L1 regularisation for each row of data: larger values set more weights to exactly 0."""
    l2: Strength = 0.0
    """Strength of L2 regularisation for each row of data."""


class MatrixFactorizationSpec(SpecModel):
    """Ratings as mean + bias of the user + bias of the item + product of their vectors, by AdaGrad."""

    name: Literal["matrix_factorization"] = "matrix_factorization"
    """Name of the sparse model."""
    factors: int = Field(default=8, ge=1, le=_MOST_FACTORS)
    """Numbers in the vector of each feature, user or item."""
    initial_deviation: float = Field(default=0.1, gt=0, le=100)
    """Standard deviation of the first vectors."""
    l2: Strength = 0.0
    """Strength of L2 regularisation for each row of data."""


class LdaSpec(SpecModel):
    """Topics of documents (latent Dirichlet allocation), by online variational Bayes."""

    name: Literal["lda"] = "lda"
    """Name of the sparse model."""
    topics: int = Field(default=10, ge=1, le=_MOST_FACTORS)
    """Number of topics."""
    alpha: float = Field(default=0.1, gt=0, le=1000)
    """Prior of the topics of a document: small values give each document few topics."""
    eta: float = Field(default=0.1, gt=0, le=1000)
    """Prior of the words of a topic: small values give each topic few words."""


class RidgeSpec(SpecModel):
    """Linear regression with L2 regularisation, by CoCoA+, which proves how far the result is from the optimum."""

    name: Literal["ridge"] = "ridge"
    """Name of the sparse model."""
    l2: float = Field(default=1e-4, gt=0, le=1e6)
    """Strength of L2 regularisation for each row of data."""


class SvmSpec(SpecModel):
    """Linear support vector machine for two classes, by CoCoA+, which proves how far the result is from the optimum."""

    name: Literal["svm"] = "svm"
    """Name of the sparse model."""
    l2: float = Field(default=1e-4, gt=0, le=1e6)
    """Strength of L2 regularisation for each row of data."""


SparseMetric: TypeAlias = Literal[
    "validation_loss", "accuracy", "auroc", "rmse", "mae", "perplexity", "duality_gap"
]
SPARSE_METRICS: Final[dict[str, tuple[SparseMetric, ...]]] = {
    "logistic": ("validation_loss", "accuracy", "auroc"),
    "factorization_machine": ("validation_loss", "accuracy", "auroc"),
    "matrix_factorization": ("validation_loss", "rmse", "mae"),
    "lda": ("validation_loss", "perplexity"),
    "ridge": ("duality_gap", "validation_loss", "rmse", "mae"),
    "svm": ("duality_gap", "validation_loss", "accuracy", "auroc"),
}
"""Metrics of each model at which a job can end."""


class SparseTargetSpec(SpecModel):
    """Value of a metric at which the job ends."""

    metric: SparseMetric
    """Metric of the validations, or duality_gap, which ridge and svm have after each round."""
    value: float = Field(allow_inf_nan=False)
    """The job ends after the first validation that is at least as good as this."""

    def is_met(self, value: float | None) -> bool:
        """Return whether a value of the metric is at least as good as the target; None is not."""
        if value is None:
            return False
        return value >= self.value if self.metric in ("accuracy", "auroc") else value <= self.value


SparseModelSpec = Annotated[
    Annotated[
        LogisticSpec | FactorizationMachineSpec | MatrixFactorizationSpec | LdaSpec | RidgeSpec | SvmSpec,
        Field(discriminator="name"),
    ],
    known_tag("name", SPARSE_MODELS, "sparse model"),
]
"""A sparse model with its options; the field ``name`` says which one."""
