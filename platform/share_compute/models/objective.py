"""The objective of training: task and loss of a job, with the facts about its data that they need."""

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
    class_weights: tuple[float, ...] | None = None
    """Factor of a sample's loss, by class; None: all are 1."""
    target_mean: float = 0.0
    """Value of the target of a regression that the model's output 0 stands for."""
    target_scale: float = 1.0
    """Difference of targets of a regression that the model's output 1 stands for."""

    @property
    def has_classes(self) -> bool:
        """Whether a sample has one class; false for language models and regressions."""
        return self.task in ("image_classification", "tabular_classification")


def objective_of(spec: TrainJob) -> Objective:
    """Return the objective of a job as it is before its data is read: without the facts about classes and targets."""
    return Objective(
        task=spec.resolved_task,
        loss=spec.resolved_loss,
        label_smoothing=spec.training.loss.label_smoothing,
    )
