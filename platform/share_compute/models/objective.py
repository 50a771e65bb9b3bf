"""The objective of training: task and loss of a job, with the required facts about its data."""

from __future__ import annotations

from share_compute.files.strict import StrictModel
from share_compute.specification import LossName, Task, TrainJob


class Objective(StrictModel):
    """Task and loss of a model."""

    task: Task = "language_model"
    loss: LossName = "cross_entropy"
    label_smoothing: float = 0.0
    """Probability that cross entropy expects to be spread evenly over all classes."""
    classes: int | None = None
    """Number of classes; None for language models and regressions, and before the data is read."""
    padding: int | None = None
    """Id of the token that fills up texts with labels; None for other data, and before the data is read."""
    class_weights: tuple[float, ...] | None = None
    """Factor of a sample's loss, by class; None: all are 1."""
    weight: float = 1.0
    """Factor of the loss in the loss that training minimizes."""
    counts_samples: bool = False
    """Whether training counts the samples of a language model, and takes the mean loss of each sample's tokens.

    All microbatches of a step have the same count then, also if other tasks have one target for each sample.
    """
    temperature: float = 0.05
    """Divisor of the cosines of info_nce."""
    target_mean: float = 0.0
    """Value of the target of a regression that the model's output 0 stands for."""
    target_scale: float = 1.0
    """Difference of targets of a regression that the model's output 1 stands for."""

    @property
    def reads_text(self) -> bool:
        """Whether samples are texts of a fixed number of tokens, other than those of language models."""
        return self.task in ("text_classification", "embedding")

    @property
    def rows(self) -> int:
        """Number of rows of a sample in a microbatch: an embedding has a row for each text of a pair."""
        return 2 if self.task == "embedding" else 1

    @property
    def has_classes(self) -> bool:
        """Whether a sample has one class; false for language models, regressions and embeddings."""
        return self.task in ("text_classification", "image_classification", "tabular_classification")


def task_of(microbatch: int, tasks: int) -> int:
    """Return the index of the task to which a microbatch of a training step belongs.

    Each task has every ``tasks``-th microbatch, so all tasks have the same number in each step.
    """
    return microbatch % tasks


def objective_of(spec: TrainJob) -> Objective:
    """Return the objective of a job before its data is read: without the facts about classes and targets."""
    return Objective(
        task=spec.resolved_task,
        loss=spec.resolved_loss,
        label_smoothing=spec.training.loss.label_smoothing,
        temperature=spec.training.loss.temperature,
    )
