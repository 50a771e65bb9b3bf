"""Checks before training whether a job's validations can have the metrics that end the job."""

from __future__ import annotations

import numpy as np

from share_compute.data.samples import Samples
from share_compute.errors import UserError
from share_compute.models.objective import Objective
from share_compute.specification import Metric, TrainJob
from share_compute.training.metrics import MOST_SCORES, TOP

_CHUNK = 4096
"""Number of samples that are taken at a time."""


def require_metrics(spec: TrainJob, objective: Objective, samples: Samples) -> None:
    """Raise UserError if a field needs a metric that no validation of these samples can have.

    Args:
        spec: the job.
        objective: task and loss, with the facts about the data.
        samples: the job's samples.
    """
    for field, metric in spec.training.watched:
        if not samples.size("validation"):
            raise UserError(
                f"training.{field.partition('.')[0]} needs samples to validate on, but the validation split is empty",
                hint="give more samples, or raise data.validation_fraction",
            )
        reason = _undefined(metric, objective, samples)
        if reason:
            raise UserError(
                f"training.{field} {metric} is never defined: {reason}",
                hint="choose another metric, or give other samples for validation",
            )


def _undefined(metric: Metric, objective: Objective, samples: Samples) -> str:
    """Return the reason why a metric cannot be computed; empty if it can."""
    size, classes = samples.size("validation"), objective.classes
    if classes is None and objective.has_classes:  # the digits, which are few
        classes = int(samples.take("train", range(samples.size("train")))[1].max()) + 1
    if metric == "r2" and size < 2:
        return "the validation split has one sample"
    if metric == "top_5_accuracy" and classes is not None and classes <= TOP:
        return f"the data has {classes} classes, and it needs more than {TOP}"
    if metric != "auroc" or classes is None:
        return ""
    if size * classes > MOST_SCORES:
        return f"{size} samples with {classes} outputs are more than {MOST_SCORES} outputs"
    known = np.zeros(classes, np.bool_)
    for start in range(0, size, _CHUNK):
        targets = samples.take("validation", range(start, min(start + _CHUNK, size)))[1]
        known[targets[:, 0] if targets.ndim > 1 else targets] = True
        if known.all():
            return ""
    return f"the validation split has samples of only {int(known.sum())} of {classes} classes"
