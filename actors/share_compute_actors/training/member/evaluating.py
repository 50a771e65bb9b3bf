"""Evaluates the outputs of the last stage for one microbatch."""

from __future__ import annotations

import torch
from torch import Tensor

from share_compute.models.losses import loss_sum, selected, similarities, target_count
from share_compute.models.objective import Objective
from share_compute.training.metrics import TOP
from share_compute_actors.messages import NUMBER, EvaluationResult


def evaluated(outputs: Tensor, targets: Tensor, objective: Objective, most_outputs: int) -> EvaluationResult:
    """Return the loss and the predictions of a microbatch.

    Args:
        outputs: outputs of the model, ``[batch, ...]``.
        targets: targets of the samples; see `loss_sum`.
        objective: task and loss.
        most_outputs: number of outputs of a classifier up to which they are returned for each sample.
    """
    loss, count = float(loss_sum(outputs, targets, objective)), target_count(targets, objective)
    if objective.task == "language_model":
        return EvaluationResult(loss, count)
    if objective.task == "embedding":
        nearest = similarities(selected(outputs, targets, objective)[0], objective).argmax(1)
        return EvaluationResult(loss, count, predicted=_packed(nearest), wanted=_packed(torch.arange(count)))
    outputs, targets = selected(outputs, targets, objective)
    scores, wanted = outputs.float().cpu(), _packed(targets)
    if not objective.has_classes:
        return EvaluationResult(loss, count, predicted=_packed(scores), wanted=wanted)
    classes = scores.shape[1]
    predicted = (scores[:, 0] > 0).long() if classes == 1 else scores.argmax(1)
    best = scores.topk(min(TOP, classes)).indices
    return EvaluationResult(
        loss,
        count,
        in_top_5=int((best == targets.cpu()[:, None]).any(1).sum()),
        predicted=_packed(predicted),
        wanted=wanted,
        scores=_packed(scores) if classes <= most_outputs else b"",
    )


def _packed(values: Tensor) -> bytes:
    return values.detach().cpu().reshape(-1).numpy().astype(NUMBER).tobytes()
