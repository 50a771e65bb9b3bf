"""Metrics of a whole validation or test split, from the predictions for all of its samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from share_compute.models.objective import Objective
from share_compute.specification.task import figure_of

MOST_SCORES = 1 << 22
"""Maximum number of outputs of a split, over all of its samples, for which ``auroc`` is computed."""
TOP = 5
"""Number of highest outputs among which ``top_5_accuracy`` looks for the class."""

Figures: TypeAlias = dict[str, float]
"""Values of metrics, by name; those of one of several tasks have its name before theirs: ``digit.accuracy``."""
Numbers: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of a model for some samples.

    Args:
        loss_sum: loss, summed over the targets.
        targets: number of targets.
        in_top_5: number of samples whose class is among those with the five highest outputs.
        predicted: predicted classes, or outputs of a regression, ``[targets]``; empty for language models.
        wanted: targets, ``[targets]``; empty for language models.
        scores: outputs, ``[targets, outputs]``; None if there are too many, and for tasks other than classification.
    """

    loss_sum: float
    targets: int
    in_top_5: int
    predicted: Numbers
    wanted: Numbers
    scores: Numbers | None = None


def figures_of(parts: Sequence[Predictions], objective: Objective) -> Figures:
    """Return the metrics of a split; the mean loss is called ``validation_loss``.

    The result does not depend on the way in which the split is divided into parts.

    Args:
        parts: predictions for all samples, in the order of the samples.
        objective: task and loss.
    """
    count = sum(part.targets for part in parts)
    loss = math.fsum(part.loss_sum for part in parts) / count
    if not math.isfinite(loss):
        return {"validation_loss": loss}
    if objective.task == "language_model":
        return {"validation_loss": loss, "perplexity": math.exp(min(loss, 700.0))}
    predicted = np.concatenate([part.predicted for part in parts])
    wanted = np.concatenate([part.wanted for part in parts])
    if objective.task == "tabular_regression":
        mean, scale = objective.target_mean, objective.target_scale
        truth, guess = (each.astype(np.float64) * scale + mean for each in (wanted, predicted))
        return {"validation_loss": loss, **_of_numbers(truth, guess)}
    if objective.task == "embedding":
        return {"validation_loss": loss, "accuracy": float((predicted == wanted).mean())}
    found: Figures = {"validation_loss": loss, "accuracy": float((predicted == wanted).mean())}
    scores = [part.scores for part in parts if part.scores is not None]
    outputs = max(int(wanted.max()), int(predicted.max())) + 1 if not scores else scores[0].shape[1]
    if max(outputs, objective.classes or 0) > TOP:
        found["top_5_accuracy"] = sum(part.in_top_5 for part in parts) / count
    from sklearn.metrics import f1_score  # noqa: PLC0415 - heavy

    found["f1"] = float(f1_score(wanted, predicted, average="macro", zero_division=0.0))
    area = _area(wanted, np.concatenate(scores), objective) if len(scores) == len(parts) else None
    if area is not None:
        found["auroc"] = area
    return found


def combined(tasks: Mapping[str, Figures], objectives: Sequence[Objective]) -> Figures:
    """Return the metrics of all tasks, with their mean loss by weight as ``validation_loss``.

    Args:
        tasks: metrics of each task, by its name.
        objectives: task and loss of each.
    """
    losses = [
        objective.weight * figures["validation_loss"]
        for figures, objective in zip(tasks.values(), objectives, strict=True)
    ]
    found: Figures = {"validation_loss": math.fsum(losses) / len(losses)}
    for task, figures in tasks.items():
        found |= {figure_of(task, name): value for name, value in figures.items()}
    return found


def _of_numbers(truth: Numbers, guess: Numbers) -> Figures:
    from sklearn import metrics  # noqa: PLC0415 - heavy

    found: Figures = {
        "rmse": float(metrics.root_mean_squared_error(truth, guess)),
        "mae": float(metrics.mean_absolute_error(truth, guess)),
    }
    if len(truth) > 1:
        found["r2"] = float(metrics.r2_score(truth, guess))
    return found


def _area(wanted: Numbers, scores: Numbers, objective: Objective) -> float | None:
    """Return the area under the ROC curve; with more than two classes, the mean over each class against the rest.

    Return None if the split lacks samples of a class, because the area is not defined then.
    """
    from sklearn.metrics import roc_auc_score  # noqa: PLC0415 - heavy

    exact = scores.astype(np.float64)
    if not np.isfinite(exact).all():
        return None
    if exact.shape[1] == 1:
        exact = np.concatenate([-exact, exact], axis=1)
    elif exact.shape[1] == 2:
        exact = exact - exact[:, ::-1]
    elif objective.loss == "cross_entropy":
        exact = _log_odds(exact)
    classes = exact.shape[1]
    if not np.array_equal(np.unique(wanted), np.arange(classes)):
        return None
    ones = [1] if classes == 2 else range(classes)
    return float(np.mean([roc_auc_score(wanted == one, exact[:, one]) for one in ones]))


def _log_odds(scores: Numbers) -> Numbers:
    """Return each score minus the log-sum-exp of the others: the logit of softmax, without its saturation at 0 and 1.

    Args:
        scores: finite scores, ``[samples, classes]``.
    """
    rows, best = np.arange(len(scores)), scores.argmax(axis=1)
    highest = scores[rows, best][:, None]
    powers = np.exp(scores - highest)
    # The highest score has the power 1. It is in the sum of the others for every score except itself, so that sum is at
    # least 1.
    others = powers.sum(axis=1, keepdims=True) - powers
    others[rows, best] = 1.0  # replaced below
    odds: Numbers = scores - highest - np.log(others)
    rest = scores.copy()
    rest[rows, best] = -np.inf
    second = rest.max(axis=1)
    odds[rows, best] = highest[:, 0] - second - np.log(np.exp(rest - second[:, None]).sum(axis=1))
    return odds
