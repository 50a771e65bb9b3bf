"""Specification of a training job, and parsers for jobs of all kinds and for deployments."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from share_compute.errors import UserError
from share_compute.files.field_errors import invalid
from share_compute.files.plain_yaml import read_yaml
from share_compute.specification.base import SpecModel, known
from share_compute.specification.batch import EmbedJob, GenerateJob
from share_compute.specification.boundaries import (
    BoundaryCompression,
    FixedBoundaryCompressionSpec,
    PlannedBoundaryCompressionSpec,
)
from share_compute.specification.data import DataSpec, TokenizerSpec
from share_compute.specification.model import ModelSpec
from share_compute.specification.serve import ServeJob
from share_compute.specification.task import LOSSES, METRICS, LossName, Task
from share_compute.specification.training import TrainingSpec


class ParallelismSpec(SpecModel):
    """Partitioning of the model over the machines."""

    strategy: str = "auto"
    """Name of the partitioning strategy, which splits the model into stages and places them."""
    stages: int | None = Field(default=None, ge=1)
    """Number of pipeline stages, one shard each; default: the strategy chooses."""
    members_per_stage: int | None = Field(default=None, ge=1)
    """Number of machines per stage, which share its microbatches; default: the strategy chooses."""
    channel: Literal["auto", "direct", "ray"] = "auto"
    """Transport of tensors: direct sockets, Ray calls, or (auto) direct wherever the machines reach each other."""
    backups: bool = True
    """Copy state that only one machine holds to another machine, so that any one machine may be lost."""

    @property
    def machines_needed(self) -> int:
        """Number of machines that ``stages`` and ``members_per_stage`` need; None counts as 1."""
        return (self.stages or 1) * (self.members_per_stage or 1)


class TrainJob(SpecModel):
    """Train a model: a causal language model on text, or declared layers on images or tables."""

    kind: Literal["train"] = "train"
    """Kind of the job."""
    name: str = Field(default="train", min_length=1, max_length=80, pattern=r"^[\w][\w .-]*$")
    """Display name of the job."""
    task: Task | None = None
    """Task of the model; default: language_model for text, image_classification for images. Tables need it."""
    model: ModelSpec
    """Model to train."""
    data: DataSpec
    """Training data."""
    tokenizer: TokenizerSpec = TokenizerSpec()
    """Tokenizer that turns text into token ids."""
    training: TrainingSpec = TrainingSpec()
    """Steps and options of training."""
    parallelism: ParallelismSpec = ParallelismSpec()
    """Partitioning of the model over the machines."""

    def with_microbatches(self, microbatches: int) -> TrainJob:
        """Return a copy of the job with this number of microbatches."""
        training = self.training.model_copy(update={"microbatches": microbatches})
        return self.model_copy(update={"training": training})

    def with_boundaries(self, boundaries: BoundaryCompression) -> TrainJob:
        """Return a copy of the job with this compression at the boundaries between stages."""
        training = self.training.model_copy(update={"boundary_compression": boundaries})
        return self.model_copy(update={"training": training})

    def with_first_boundaries(self, boundaries: FixedBoundaryCompressionSpec) -> TrainJob:
        """Return the job with the compression of its first plan's boundaries, if the first plan decides on it."""
        is_planned = isinstance(self.training.boundary_compression, PlannedBoundaryCompressionSpec)
        return self.with_boundaries(boundaries) if is_planned else self

    @model_validator(mode="after")
    def _model_fits_data(self) -> Self:
        if (self.model.layers is None) != self.data.is_text:
            raise ValueError(
                "declared layers train on a dataset, tables or images, language models on text files"
            )
        return self

    @model_validator(mode="after")
    def _task_fits_data(self) -> Self:
        if self.data.table is not None:
            fitting: tuple[Task, ...] = ("tabular_classification", "tabular_regression")
        else:
            fitting = ("language_model",) if self.data.is_text else ("image_classification",)
        if self.task is None and len(fitting) > 1:
            raise ValueError(f"data.table needs a task: {' or '.join(fitting)}")
        if self.task is not None and self.task not in fitting:
            raise ValueError(f"task {self.task} does not fit the data, whose task is {' or '.join(fitting)}")
        return self

    @property
    def resolved_task(self) -> Task:
        """The task, also if it follows from the data."""
        if self.task is not None:
            return self.task
        return "language_model" if self.data.is_text else "image_classification"

    @property
    def resolved_loss(self) -> LossName:
        """The name of the loss, also if it follows from the task."""
        return self.training.loss.name or LOSSES[self.resolved_task][0]

    @model_validator(mode="after")
    def _loss_and_metrics_fit_task(self) -> Self:
        task, training, loss = self.resolved_task, self.training, self.training.loss
        if loss.name not in (None, *LOSSES[task]):
            raise ValueError(
                f"training.loss.name {loss.name} is no loss of {task}: {', '.join(LOSSES[task])}"
            )
        if loss.label_smoothing and self.resolved_loss != "cross_entropy":
            raise ValueError("training.loss.label_smoothing needs training.loss.name cross_entropy")
        if loss.class_weights is not None and task in ("language_model", "tabular_regression"):
            raise ValueError(f"training.loss.class_weights: {task} has no classes")
        for name, ending in training.endings:
            if ending.metric not in METRICS[task]:
                known_ones = ", ".join(METRICS[task])
                raise ValueError(
                    f"training.{name}.metric {ending.metric} is no metric of {task}: {known_ones}"
                )
        return self

    @model_validator(mode="after")
    def _training_fits_model(self) -> Self:
        training = self.training
        if training.samples is not None and self.model.layers is not None:
            raise ValueError("training.samples: declared layers make no text; only language models do")
        if training.lora is not None and self.model.path is None:
            raise ValueError("training.lora adapts a pretrained model: give model.path")
        for name, _ in training.endings:
            if not self.data.validates:
                raise ValueError(
                    f"training.{name} needs samples to validate on: raise data.validation_fraction"
                )
        return self

    @model_validator(mode="after")
    def _members_have_work(self) -> Self:
        members, microbatches = self.parallelism.members_per_stage, self.training.microbatches
        if members is not None and microbatches is not None and members > microbatches:
            raise ValueError(
                f"parallelism.members_per_stage {members} is more than training.microbatches {microbatches}: "
                "each member needs at least one"
            )
        return self


Job = Annotated[TrainJob | GenerateJob | EmbedJob, Field(discriminator="kind")]
"""A job of any kind. A `ServeJob` is a deployment, not a job."""
Kind = Literal["train", "generate", "embed", "serve"]
_KINDS: dict[str, type[TrainJob | GenerateJob | EmbedJob | ServeJob]] = {
    "train": TrainJob,
    "generate": GenerateJob,
    "embed": EmbedJob,
    "serve": ServeJob,
}
Spec = TypeVar("Spec", bound=SpecModel)


def parse_job(source: str | dict[str, Any]) -> TrainJob:
    """Read a training job from YAML (or JSON) text or from a mapping.

    Raises:
        UserError: the text or a field is invalid, or the job is of another kind.
    """
    job = parse_any_job(source)
    if not isinstance(job, TrainJob):
        raise UserError(f"kind: {job.kind} trains nothing", hint="give a job of kind: train")
    return job


def parse_any_job(source: str | dict[str, Any]) -> TrainJob | GenerateJob | EmbedJob:
    """Read a job of any kind from YAML (or JSON) text or from a mapping.

    Raises:
        UserError: the text or a field is invalid, or the source is a deployment.
    """
    job = parse_submission(source)
    if isinstance(job, ServeJob):
        raise UserError(
            "kind: serve asks for a deployment, not for a job",
            hint="share-compute submit FILE makes one; REST: POST /api/v1/deployments",
        )
    return job


def parse_deployment(source: str | dict[str, Any]) -> ServeJob:
    """Read a deployment from YAML (or JSON) text or from a mapping; ``kind`` may be left out.

    Raises:
        UserError: the text or a field is invalid.
    """
    return _validated(ServeJob, {"kind": "serve", **_mapping(source)})


def parse_submission(source: str | dict[str, Any]) -> TrainJob | GenerateJob | EmbedJob | ServeJob:
    """Read a job or a deployment, depending on its ``kind``, from YAML (or JSON) text or from a mapping.

    Raises:
        UserError: the text or a field is invalid.
    """
    data = _mapping(source)
    kind = data.get("kind", "train")
    return _validated(_KINDS.get(kind, TrainJob) if isinstance(kind, str) else TrainJob, data)


def _mapping(source: str | dict[str, Any]) -> dict[str, Any]:
    data: Any = read_yaml(source, "job file") if isinstance(source, str) else source
    if not isinstance(data, dict):
        raise UserError(
            f"a job is a mapping of keys, not {type(data).__name__}", hint="start from a file in examples/"
        )
    try:
        known(data.get("kind", "train"), tuple(_KINDS), "kind")
    except ValueError as failure:
        raise UserError(str(failure), hint="fix the job's kind") from failure
    return data


def _validated(kind: type[Spec], data: dict[str, Any]) -> Spec:
    try:
        return kind.model_validate(data)
    except ValidationError as failure:
        raise invalid(failure, "fix these fields of the job") from failure


def job_schema(kind: Kind = "train") -> dict[str, Any]:
    """Return the JSON schema of a job or deployment of this kind, for editors and forms."""
    return _KINDS[kind].model_json_schema()
