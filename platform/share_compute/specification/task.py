"""Tasks of training jobs, with their losses and metrics."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field

from share_compute.specification.base import SpecModel

Task: TypeAlias = Literal[
    "language_model", "image_classification", "tabular_classification", "tabular_regression"
]
LossName: TypeAlias = Literal["cross_entropy", "bce", "hinge", "mse", "mae"]
Metric: TypeAlias = Literal[
    "validation_loss", "accuracy", "top_5_accuracy", "f1", "auroc", "rmse", "mae", "r2", "perplexity"
]
"""Metric of a validation; the data of events and of saved files have it under this name."""

RISING: frozenset[Metric] = frozenset({"accuracy", "top_5_accuracy", "f1", "auroc", "r2"})
"""Metrics that are better if they are higher; the others are better if they are lower."""
_CLASSES: tuple[Metric, ...] = ("accuracy", "top_5_accuracy", "f1", "auroc")
METRICS: dict[Task, tuple[Metric, ...]] = {
    "language_model": ("validation_loss", "perplexity"),
    "image_classification": ("validation_loss", *_CLASSES),
    "tabular_classification": ("validation_loss", *_CLASSES),
    "tabular_regression": ("validation_loss", "rmse", "mae", "r2"),
}
LOSSES: dict[Task, tuple[LossName, ...]] = {
    "language_model": ("cross_entropy",),
    "image_classification": ("cross_entropy", "bce", "hinge"),
    "tabular_classification": ("cross_entropy", "bce", "hinge"),
    "tabular_regression": ("mse", "mae"),
}
"""Losses of each task, its default first."""
METRICS_BESIDE_LOSS: tuple[Metric, ...] = tuple(
    name for name in get_args(Metric) if name != "validation_loss"
)
"""All metrics but the loss, which some data has under another name."""

Weight: TypeAlias = Annotated[float, Field(gt=0)]


class LossSpec(SpecModel):
    """Loss that training minimizes: the mean over the samples of a step, or over the tokens of text."""

    name: LossName | None = Field(default=None, title="Loss")
    """Loss of a sample; default: cross_entropy, or mse for tabular_regression."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Probability that cross_entropy expects to be spread evenly over all classes."""
    class_weights: Literal["balanced"] | Annotated[tuple[Weight, ...], Field(fail_fast=True)] | None = None
    """Factor of each sample's loss by its class, in the order of the classes; balanced: inverse to their frequency."""


class TargetSpec(SpecModel):
    """Value of a metric at which the job ends."""

    metric: Metric
    """Metric of the validations."""
    value: float
    """The job ends after the first validation that is at least as good as this."""
