"""Tasks of training jobs, with their losses and metrics, and the field ``tasks`` of jobs with several tasks."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field, WithJsonSchema

from share_compute.specification.base import SpecModel
from share_compute.specification.data import DataSpec
from share_compute.specification.layers import Layers

Task: TypeAlias = Literal[
    "language_model",
    "text_classification",
    "image_classification",
    "tabular_classification",
    "tabular_regression",
    "embedding",
]
LossName: TypeAlias = Literal["cross_entropy", "bce", "hinge", "mse", "mae", "info_nce"]
Metric: TypeAlias = Literal[
    "validation_loss", "accuracy", "top_5_accuracy", "f1", "auroc", "rmse", "mae", "r2", "perplexity"
]
"""Name of a metric of a validation, also in the data of events and in saved files."""

RISING: frozenset[Metric] = frozenset({"accuracy", "top_5_accuracy", "f1", "auroc", "r2"})
"""Metrics that are better if they are higher; the others are better if they are lower."""
_CLASSES: tuple[Metric, ...] = ("accuracy", "top_5_accuracy", "f1", "auroc")
METRICS: dict[Task, tuple[Metric, ...]] = {
    "language_model": ("validation_loss", "perplexity"),
    "text_classification": ("validation_loss", *_CLASSES),
    "image_classification": ("validation_loss", *_CLASSES),
    "tabular_classification": ("validation_loss", *_CLASSES),
    "tabular_regression": ("validation_loss", "rmse", "mae", "r2"),
    "embedding": ("validation_loss", "accuracy"),
}
LOSSES: dict[Task, tuple[LossName, ...]] = {
    "language_model": ("cross_entropy",),
    "text_classification": ("cross_entropy", "bce", "hinge"),
    "image_classification": ("cross_entropy", "bce", "hinge"),
    "tabular_classification": ("cross_entropy", "bce", "hinge"),
    "tabular_regression": ("mse", "mae"),
    "embedding": ("info_nce",),
}
"""Losses of each task, its default first."""
METRICS_BESIDE_LOSS: tuple[Metric, ...] = tuple(
    name for name in get_args(Metric) if name != "validation_loss"
)
"""All metrics but the loss, which some data has under another name."""


def figure_of(task: str | None, metric: str) -> str:
    """Return the key of a metric in `Figures`: ``TASK.METRIC`` for one of several tasks, else the metric's name."""
    return metric if task is None else f"{task}.{metric}"


def data_name(metric: Metric) -> str:
    """Return the name of a metric in the data of a validation: the loss is named ``loss`` there."""
    return "loss" if metric == "validation_loss" else metric


Weight: TypeAlias = Annotated[float, Field(gt=0)]


class LossSpec(SpecModel):
    """Loss that training minimizes: the mean over the samples of a step, or over the tokens of text."""

    name: LossName | None = Field(default=None, title="Loss")
    """Loss of a sample; default: cross_entropy, mse for tabular_regression, info_nce for embedding."""
    temperature: float = Field(default=0.05, gt=0, le=100)
    """Divisor of the cosines of info_nce."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Probability that cross_entropy expects to be spread evenly over all classes."""
    class_weights: Literal["balanced"] | Annotated[tuple[Weight, ...], Field(fail_fast=True)] | None = None
    """Factor of each sample's loss by its class, in the order of the classes; balanced: inverse to their frequency."""


class TargetSpec(SpecModel):
    """Value of a metric at which the job ends."""

    task: str | None = Field(default=None, title="Task of the metric")
    """Name of the task to which the metric belongs, in a job with ``tasks``; default: the loss of all tasks."""
    metric: Metric
    """Metric of the validations."""
    value: float
    """The job ends after the first validation that is at least as good as this."""

    @property
    def figure(self) -> str:
        """Name of the metric among the figures of a validation."""
        return figure_of(self.task, self.metric)


MOST_TASKS = 16
_OBJECT = {"type": "object"}
"""JSON schema of a part with the fields of another part of the job. Forms write it as YAML."""
_NESTED = WithJsonSchema({"anyOf": [{"type": "array", "items": _OBJECT}, {"type": "null"}]})
_PART = WithJsonSchema({"anyOf": [_OBJECT, {"type": "null"}]})


class TaskSpec(SpecModel):
    """One of several tasks of a model."""

    name: str = Field(min_length=1, max_length=40, pattern=r"^[a-z][a-z0-9_]*$")
    """Name of the task, before the names of its metrics: small letters, digits and _."""
    task: Task | None = None
    """Kind of the task; default: it follows from the data. Tables need it."""
    data: Annotated[DataSpec | None, _PART] = None
    """Data of the task, with the fields of ``data``; default: ``data`` of the job, which the first task always has."""
    loss: Annotated[LossSpec | None, _PART] = None
    """Loss of the task, with the fields of ``training.loss``."""
    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Factor of the task's loss in the loss that training minimizes."""
    layers: Annotated[Layers | None, _NESTED] = None
    """Head of the task: declared layers after ``model.layers``, with the same fields as these."""
