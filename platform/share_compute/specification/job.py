"""Specification of a training job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    Field,
    ValidationError,
    model_validator,
)

from share_compute.files.problem_words import problem_text
from share_compute.specification.base import Group, SpecModel, Tags, known
from share_compute.specification.boundaries import (
    BoundaryCompression,
    FixedBoundaryCompressionSpec,
    PlannedBoundaryCompressionSpec,
)
from share_compute.specification.chain import ThenSpec
from share_compute.specification.data import DataSpec, TokenizerSpec
from share_compute.specification.layers import (
    BATCH_NORMS,
    EMBEDDINGS,
    every_module,
    reason_against_tiles,
    require_few,
)
from share_compute.specification.model import ModelSpec
from share_compute.specification.placement.parallelism import ParallelismSpec
from share_compute.specification.placement.sequence import require_slices
from share_compute.specification.task import LOSSES, METRICS, MOST_TASKS, LossName, LossSpec, Task, TaskSpec
from share_compute.specification.training import TrainingSpec

Report: TypeAlias = Literal["tensorboard", "mlflow", "wandb"]
"""Format in which a job's curves are written at its end."""


def _without_repetition(reports: tuple[Report, ...]) -> tuple[Report, ...]:
    if len(set(reports)) < len(reports):
        raise ValueError("a format is given twice")
    return reports


class TrainJob(SpecModel):
    """Train a model: a causal language model on text, or declared layers on images, tables or texts with labels."""

    kind: Literal["train"] = "train"
    """Kind of the job."""
    name: str = Field(default="train", min_length=1, max_length=80, pattern=r"^[\w][\w .-]*$")
    """Display name of the job."""
    tags: Tags = ()
    """Tags by which the job is found."""
    group: Group | None = None
    """Group of jobs that belong together."""
    task: Task | None = None
    """Task of the model; default: it follows from the data. Tables need it."""
    tasks: tuple[TaskSpec, ...] = Field(
        default=(), title="Several tasks", max_length=MOST_TASKS, fail_fast=True
    )
    """Tasks that share the layers of the model, each with a head, a loss and a weight of its own."""
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
    then: ThenSpec = ThenSpec()
    """Deployment and batch that start from the result when the job has succeeded."""
    report: Annotated[tuple[Report, ...], Field(fail_fast=True), AfterValidator(_without_repetition)] = ()
    """Formats in which the server writes the job's curves at its end, each as a result of the job."""

    @property
    def single_tasks(self) -> tuple[TrainJob, ...]:
        """The job as one job per task, with the task's data, loss, head and ends; the job itself without tasks."""
        if not self.tasks:
            return (self,)
        return tuple(self.model_copy(update=self._fields_of(task)) for task in self.tasks)

    def _fields_of(self, task: TaskSpec) -> dict[str, Any]:
        """Return the fields that a job for a single task changes."""
        training = self.training
        ends = {
            name: ending.model_copy(update={"task": None})
            for name, ending in training.endings
            if ending.task == task.name
        }
        model = self.model
        if model.layers is not None:
            model = model.model_copy(update={"layers": (*model.layers, *(task.layers or ()))})
        return {
            "tasks": (),
            "task": task.task,
            "model": model,
            "data": task.data or self.data,
            "training": training.model_copy(
                update={"loss": task.loss or LossSpec(), "early_stopping": None, "target": None, **ends}
            ),
            "then": ThenSpec(),
        }

    def with_microbatches(self, microbatches: int) -> TrainJob:
        """Return a copy of the job for a plan with this number of microbatches, in which each slice counts as one."""
        training = self.training.model_copy(
            update={"microbatches": microbatches // self.parallelism.sequence}
        )
        return self.model_copy(update={"training": training})

    def without_pinned_plan(self) -> TrainJob:
        """Return a copy of the job without its pinned plan, which the planner may place freely."""
        if self.parallelism.plan is None:
            return self
        return self.model_copy(update={"parallelism": self.parallelism.model_copy(update={"plan": None})})

    def without_links(self) -> TrainJob:
        """Return a copy of the job that starts nothing from its result."""
        return self.model_copy(update={"then": ThenSpec()})

    def with_boundaries(self, boundaries: BoundaryCompression) -> TrainJob:
        """Return a copy of the job with this compression at the boundaries between stages."""
        training = self.training.model_copy(update={"boundary_compression": boundaries})
        return self.model_copy(update={"training": training})

    def with_first_boundaries(self, boundaries: FixedBoundaryCompressionSpec) -> TrainJob:
        """Return the job with the boundary compression of its first plan, if the job leaves it to that plan."""
        is_planned = isinstance(self.training.boundary_compression, PlannedBoundaryCompressionSpec)
        return self.with_boundaries(boundaries) if is_planned else self

    @model_validator(mode="after")
    def _tasks_fit(self) -> Self:
        if not self.tasks:
            for name, ending in self.training.endings:
                if ending.task is not None:
                    raise ValueError(f"training.{name}.task {ending.task!r} is for a job with tasks")
            return self
        self._tasks_are_possible()
        self._tasks_share_steps()
        for place, task in enumerate(self.tasks):
            fields = {name: getattr(self, name) for name in type(self).model_fields}
            try:
                TrainJob.model_validate({**fields, **self._fields_of(task)})
            except ValidationError as failure:
                problem = problem_text(failure.errors(include_url=False)[0])
                raise ValueError(f"tasks.{place} ({task.name}): {problem}") from None
        return self

    def _tasks_are_possible(self) -> None:
        """Raise ValueError if a field of the job contradicts its tasks."""
        if self.task is not None:
            raise ValueError(f"task {self.task}: give it to the first of the tasks")
        if self.training.loss != LossSpec():
            raise ValueError("training.loss: give each of the tasks its own loss")
        if self.tasks[0].data is not None:
            raise ValueError("tasks.0.data: the first task has the data of the job: give it in data")
        if self.then.links:
            raise ValueError(f"then.{self.then.links[0]}: the result of a job with tasks cannot be served")
        self._heads_are_possible()
        if self.model.layers is None:
            self._language_model_can_be_shared()
            return
        require_few((*self.model.layers, *(layer for task in self.tasks for layer in task.layers or ())))

    def _heads_are_possible(self) -> None:
        """Raise ValueError if a task has an invalid name or head, or data that cannot share the model."""
        names = [task.name for task in self.tasks]
        for place, task in enumerate(self.tasks):
            if task.name in names[:place]:
                raise ValueError(f"tasks.{place}.name {task.name!r} is given twice")
            if not task.layers and self.model.layers is not None:
                raise ValueError(f"tasks.{place}.layers: {task.name} needs a head, a list of layers")
            for layer in every_module(task.layers or ()):
                if layer.type in (*BATCH_NORMS, *EMBEDDINGS):
                    raise ValueError(
                        f"tasks.{place}.layers: {layer.type} cannot be in a head: put it into model.layers"
                    )
            data = task.data or self.data
            if data.pairs is not None:
                raise ValueError(f"tasks.{place}.data.pairs: an embedding cannot be one of several tasks")
            if data.is_text and self.tokenizer.path is None:
                raise ValueError(
                    f"tokenizer.path is needed for tasks.{place}: tasks with texts share a tokenizer, which is a folder"
                )

    def _language_model_can_be_shared(self) -> None:
        """Raise ValueError if the tasks cannot share a Hugging Face model, which has a head for each of them."""
        kinds = [single.resolved_task for single in self.single_tasks]
        for place, (task, kind) in enumerate(zip(self.tasks, kinds, strict=True)):
            if kind not in ("language_model", "text_classification"):
                raise ValueError(
                    f"tasks.{place} ({task.name}): a Hugging Face model is shared by tasks language_model and "
                    f"text_classification, not {kind}: give model.layers in its place"
                )
            if task.layers:
                raise ValueError(
                    f"tasks.{place}.layers: a Hugging Face model has a head for each task: leave layers out"
                )
        if len(kinds) > 1 and "language_model" not in kinds:
            raise ValueError(
                "tasks: one of the tasks that share a Hugging Face model must be language_model, since they share a "
                "language model"
            )
        for name in ("lora", "samples"):
            if getattr(self.training, name) is not None:
                raise ValueError(f"training.{name} is not possible with tasks")

    def _tasks_share_steps(self) -> None:
        """Raise ValueError if the steps of the job cannot be divided among its tasks, or an end names no metric."""
        training, count = self.training, len(self.tasks)
        if training.rounds is not None:
            raise ValueError("training.synchronization: only allreduce is possible with tasks")
        if count > 1 and training.microbatches is None:
            raise ValueError(
                f"training.microbatches is needed with {count} tasks: each microbatch belongs to one task"
            )
        if training.microbatches is not None and training.microbatches % count:
            raise ValueError(
                f"training.microbatches {training.microbatches} is not a multiple of the {count} tasks: each step "
                "has the same number of microbatches of each task"
            )
        if len({(task.data or self.data).validates for task in self.tasks}) > 1:
            raise ValueError(
                "tasks: either all of them or none keep samples for validation: set data.validation_fraction alike"
            )
        fractions: dict[tuple[Path, ...], tuple[float, float]] = {}
        for place, task in enumerate(self.tasks):
            data = task.data or self.data
            given = data.validation_fraction, data.test_fraction
            if data.files and fractions.setdefault(data.files, given) != given:
                raise ValueError(
                    f"tasks.{place}.data: another task has the same files with another validation_fraction or "
                    "test_fraction, so it would train on rows that this one keeps for validation"
                )
            if task.data is not None and task.data.slicing != self.data.slicing:
                raise ValueError(
                    f"tasks.{place}.data.slicing: tasks share their layers, so give that of data"
                )
        names = [task.name for task in self.tasks]
        for name, ending in training.endings:
            if ending.task is not None:
                known(ending.task, names, f"task of training.{name}")
            elif ending.metric != "validation_loss":
                raise ValueError(
                    f"training.{name}.metric {ending.metric} is a metric of one task: give training.{name}.task"
                )
        plateau = training.schedule.plateau
        if plateau is not None and plateau.metric != "validation_loss":
            raise ValueError(
                f"training.schedule.options.metric {plateau.metric} is a metric of one task: use validation_loss"
            )

    @model_validator(mode="after")
    def _model_fits_data(self) -> Self:
        if self.tasks:
            return self
        takes_both = bool(self.data.text_columns) or self.data.images is not None
        if not takes_both and (self.model.layers is None) != self.data.is_text:
            raise ValueError(
                "model and data do not fit: declared layers train on a dataset, tables, images or texts with "
                "data.labels, language models on text files"
            )
        return self

    @property
    def reads_tokens(self) -> bool:
        """Whether the model is a Hugging Face model for text, whose costs depend on ``training.sequence_length``."""
        return self.model.layers is None and self.data.images is None

    @model_validator(mode="after")
    def _task_fits_data(self) -> Self:
        if self.tasks:
            return self
        if self.data.table is not None:
            fitting: tuple[Task, ...] = ("tabular_classification", "tabular_regression")
        else:
            fitting = (self._task_of_data,)
        if self.task is None and len(fitting) > 1:
            raise ValueError(f"data.table needs a task: {' or '.join(fitting)}")
        if self.task is not None and self.task not in fitting:
            raise ValueError(f"task {self.task} does not fit the data, whose task is {' or '.join(fitting)}")
        return self

    @property
    def resolved_task(self) -> Task:
        """The task, given or derived from the data; with several tasks, the first one's."""
        if self.tasks and self.tasks[0].task is not None:
            return self.tasks[0].task
        if self.task is not None:
            return self.task
        return self._task_of_data

    @property
    def model_task(self) -> Task:
        """The task that determines the model's class; tasks that share a Hugging Face model share a language model."""
        return "language_model" if len(self.tasks) > 1 and self.model.layers is None else self.resolved_task

    @property
    def _task_of_data(self) -> Task:
        """The task that follows from data other than tables."""
        if self.data.pairs is not None:
            return "embedding"
        if self.data.labels is not None:
            return "text_classification"
        return "language_model" if self.data.is_text else "image_classification"

    @property
    def makes_served_model(self) -> bool:
        """Whether the result is a language model with all its weights, which can be served."""
        has_weights = self.training.lora is None or self.training.lora.merge
        return self.resolved_task == "language_model" and has_weights

    @property
    def resolved_loss(self) -> LossName:
        """The name of the loss, given or derived from the task."""
        return self.training.loss.name or LOSSES[self.resolved_task][0]

    @model_validator(mode="after")
    def _loss_and_metrics_fit_task(self) -> Self:
        if self.tasks:
            return self
        task, training, loss = self.resolved_task, self.training, self.training.loss
        if loss.name not in (None, *LOSSES[task]):
            raise ValueError(
                f"training.loss.name {loss.name} is no loss of {task}: {', '.join(LOSSES[task])}"
            )
        if loss.label_smoothing and self.resolved_loss != "cross_entropy":
            raise ValueError("training.loss.label_smoothing needs training.loss.name cross_entropy")
        if loss.temperature != LossSpec().temperature and self.resolved_loss != "info_nce":
            raise ValueError("training.loss.temperature needs training.loss.name info_nce")
        if loss.class_weights is not None and task in ("language_model", "tabular_regression", "embedding"):
            raise ValueError(f"training.loss.class_weights: {task} has no classes")
        for field, metric in training.watched:
            if metric not in METRICS[task]:
                known_ones = ", ".join(METRICS[task])
                raise ValueError(f"training.{field} {metric} is no metric of {task}: {known_ones}")
        return self

    @model_validator(mode="after")
    def _microbatches_have_negatives(self) -> Self:
        if self.resolved_task != "embedding":
            return self
        training = self.training
        if training.microbatches is None:
            raise ValueError(
                "training.microbatches is needed for embedding: each pair is compared with the others of its "
                "microbatch, so the loss depends on their number"
            )
        if training.microbatch_size < 2:
            raise ValueError(
                f"training.batch_size {training.batch_size} with {training.microbatches} microbatches gives "
                "microbatches of one pair, which has no other pairs to be compared with"
            )
        return self

    @model_validator(mode="after")
    def _training_fits_model(self) -> Self:
        training = self.training
        if training.samples is not None and self.resolved_task != "language_model":
            raise ValueError(f"training.samples: a model for {self.resolved_task} makes no text")
        if training.lora is not None and self.model.layers is not None:
            raise ValueError(
                "training.lora adapts Hugging Face models, not declared layers: give model.path or model.hub, or "
                "training.freeze in place of training.lora"
            )
        if training.lora is not None and not self.model.is_pretrained:
            raise ValueError("training.lora adapts a pretrained model: give model.path or model.hub")
        for field, _ in training.watched:
            if not self.data.validates:
                raise ValueError(
                    f"training.{field.partition('.')[0]} needs samples to validate on: raise data.validation_fraction"
                )
        return self

    @model_validator(mode="after")
    def _result_can_be_served(self) -> Self:
        for name in self.then.links:
            if self.resolved_task != "language_model":
                raise ValueError(
                    f"then.{name}: the result of task {self.resolved_task} cannot be served, only language models can"
                )
            if self.training.lora is not None and not self.training.lora.merge:
                raise ValueError(f"then.{name} needs training.lora.merge: adapters alone cannot be served")
        return self

    @model_validator(mode="after")
    def _batch_norm_fits_training(self) -> Self:
        training = self.training
        norms = [layer.type for layer in every_module(self.model.layers or ()) if layer.type in BATCH_NORMS]
        if not norms:
            return self
        if training.microbatches is None:
            raise ValueError(
                f"model.layers: {norms[0]} has the statistics of each microbatch: give training.microbatches"
            )
        if training.microbatch_size < 2:
            raise ValueError(
                f"model.layers: {norms[0]} needs microbatches of 2 samples: lower training.microbatches"
            )
        for name, is_used in (
            ("synchronization: only allreduce", training.rounds is not None),
            ("compression: only none", training.compresses_sums),
        ):
            if is_used:
                raise ValueError(
                    f"training.{name} is possible with {norms[0]}, because a merge of its statistics is not defined; "
                    "group_norm has none"
                )
        return self

    @model_validator(mode="after")
    def _first_block_can_be_cut(self) -> Self:
        if self.data.tiles is None:
            return self
        layers = self.model.layers
        if layers is None:
            raise ValueError("data.slicing in tiles needs declared layers: give model.layers")
        if layers[0].type != "sequential":
            raise ValueError(
                f"data.slicing in tiles computes the first layer in tiles, and model.layers.0 is {layers[0].type}: put "
                "the convolutions before the first flatten into a sequential block, and make it the first layer"
            )
        for layer in every_module(layers[:1]):
            if (reason := reason_against_tiles(layer)) is not None:
                raise ValueError(
                    f"model.layers.0 cannot be computed in tiles, as data.slicing wants: {reason}"
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

    @model_validator(mode="after")
    def _ranks_compute_alike(self) -> Self:
        if self.parallelism.tensor > 1 and self.training.compile != "off":
            raise ValueError(
                f"parallelism.tensor {self.parallelism.tensor} needs training.compile off, and it is "
                f"{self.training.compile}: the processes of a machine compute eagerly"
            )
        if self.parallelism.operators.strategies and self.model.layers is not None:
            raise ValueError(
                "parallelism.operators.strategies names operators in the layers of a Hugging Face model, and "
                "model.layers declares others"
            )
        return self

    @model_validator(mode="after")
    def _sequences_can_be_cut(self) -> Self:
        is_text = self.reads_tokens and not self.tasks and self.resolved_task == "language_model"
        require_slices(self.parallelism, self.training, is_language_model=is_text)
        return self

    @model_validator(mode="after")
    def _shares_are_possible(self) -> Self:
        training = self.training
        if not self.parallelism.shares_optimizer:
            return self
        name = "parallelism.optimizer sharded"
        if training.synchronization.kind != "allreduce":
            raise ValueError(
                f"{name} needs training.synchronization {{kind: allreduce}}: branches merge whole weights and states"
            )
        if training.compresses_sums:
            raise ValueError(
                f"{name} sums shares of the gradients without compression: set training.compression to {{name: none}}"
            )
        if training.collective not in ("auto", "sharded"):
            raise ValueError(
                f"{name} sends each share of the gradients directly to its member: set training.collective to auto or "
                f"sharded, not {training.collective}"
            )
        return self

    @model_validator(mode="after")
    def _pinned_plan_fits(self) -> Self:
        plan, training = self.parallelism.plan, self.training
        if plan is None:
            return self
        if training.synchronization.kind != "allreduce":
            raise ValueError(
                "parallelism.plan needs training.synchronization {kind: allreduce}: each branch has a plan of its own"
            )
        microbatches = plan.microbatches // self.parallelism.sequence
        if training.microbatches not in (None, microbatches):
            raise ValueError(
                f"parallelism.plan has {microbatches} microbatches, and training.microbatches is "
                f"{training.microbatches}"
            )
        if training.batch_size % microbatches:
            raise ValueError(
                f"training.batch_size {training.batch_size} is not a multiple of the {microbatches} microbatches "
                "of parallelism.plan"
            )
        return self
