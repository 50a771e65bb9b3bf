"""Pictures of the predictions for a whole split: a confusion matrix, or the points of a regression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from share_compute.models.objective import Objective
from share_compute.quantities import clipped
from share_compute.training.metrics import Predictions

MOST_CLASSES = 100
"""Maximum number of classes of a confusion matrix."""
MOST_POINTS = 1000
"""Maximum number of points of a regression; of more samples, evenly spaced ones are taken."""


@dataclass(frozen=True, slots=True)
class Picture:
    """Predictions for a whole split; exactly one of ``confusion`` and ``points`` is given.

    Args:
        samples: number of samples in the split.
        confusion: number of samples by true class and predicted class, ``[classes][classes]``.
        classes: names of the classes, if they have any.
        points: true and predicted value of samples in the unit of the target, ``[points][2]``.
    """

    samples: int
    confusion: tuple[tuple[int, ...], ...] | None = None
    classes: tuple[str, ...] | None = None
    points: tuple[tuple[float, float], ...] | None = None


def picture_of(
    parts: Sequence[Predictions], objective: Objective, names: Sequence[str] | None = None
) -> Picture | None:
    """Return the picture of a split; None for tasks without classes or values, and for too many classes.

    The result does not depend on the way in which the split is divided into parts.

    Args:
        parts: predictions for all samples, in the order of the samples.
        objective: task, and the facts about the data.
        names: names of the classes, if they have any.
    """
    if not objective.has_classes and objective.task != "tabular_regression":
        return None
    predicted = np.concatenate([part.predicted for part in parts]).astype(np.float64)
    wanted = np.concatenate([part.wanted for part in parts]).astype(np.float64)
    count = len(wanted)
    if not count or not (np.isfinite(predicted).all() and np.isfinite(wanted).all()):
        return None
    if not objective.has_classes:
        chosen = np.linspace(0, count - 1, min(count, MOST_POINTS)).round().astype(np.int64)
        mean, scale = objective.target_mean, objective.target_scale
        points = np.stack([wanted[chosen], predicted[chosen]], axis=1) * scale + mean
        return Picture(count, points=tuple((float(truth), float(guess)) for truth, guess in points))
    classes = objective.classes or int(max(wanted.max(), predicted.max())) + 1
    if classes > MOST_CLASSES:
        return None
    places = wanted.astype(np.int64) * classes + predicted.astype(np.int64)
    matrix = np.bincount(places, minlength=classes * classes).reshape(classes, classes)
    return Picture(
        count,
        confusion=tuple(tuple(int(each) for each in row) for row in matrix),
        classes=None if names is None or len(names) != classes else tuple(map(clipped, names)),
    )
