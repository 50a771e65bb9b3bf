"""Losses of all tasks, summed over the samples of a microbatch.

Sums are exact parts of the loss of a step: their sum over the microbatches, divided by the number of samples, does not
depend on the plan.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from share_compute.errors import UserError
from share_compute.models.objective import Objective

LANGUAGE = Objective()


def loss_sum(outputs: Tensor, targets: Tensor, objective: Objective = LANGUAGE) -> Tensor:
    """Return the loss summed over all targets.

    Args:
        outputs: model outputs, ``[..., classes]``; of a regression ``[batch]`` or ``[batch, 1]``.
        targets: class or token ids, ``[...]``; of a regression, scaled values. Class ids on a GPU are read, which
            synchronizes the GPU.
        objective: task and loss.

    Raises:
        UserError: the model's outputs do not fit the targets.
    """
    if objective.task == "tabular_regression" or objective.classes is not None:
        require_outputs(outputs, objective)
    else:
        classes = outputs.shape[-1]
        if targets.numel() and int(targets.max()) >= classes:
            raise UserError(
                f"the model's last layer has {classes} outputs, but the data has class {int(targets.max())}",
                hint=f"give the last layer at least {int(targets.max()) + 1} outputs",
            )
    return summed_loss(outputs, targets, objective)


def require_outputs(outputs: Tensor, objective: Objective) -> None:
    """Raise UserError if the outputs of a classifier with a known number of classes, or of a regression, do not fit.

    Args:
        outputs: outputs of the last layer for a microbatch, ``[batch, ...]``; may be on the meta device.
        objective: task and loss.
    """
    shape, classes = list(outputs.shape[1:]), objective.classes
    fitting: tuple[list[int], ...]
    if objective.task == "tabular_regression":
        fitting, what = ([], [1]), "1 output for a regression"
    elif classes == 2 and objective.loss in ("bce", "hinge"):
        fitting, what = ([1], [2]), "1 or 2 outputs for 2 classes"
    elif classes is not None:
        fitting, what = ([classes],), f"{classes} outputs, one for each class"
    else:
        return
    if shape not in fitting:
        raise UserError(
            f"the model's last layer returns {shape or 'one number'} for each sample",
            hint=f"let model.layers end with {what}, and flatten the last layer's output",
        )


def summed_loss(outputs: Tensor, targets: Tensor, objective: Objective) -> Tensor:
    """Return the loss summed over all targets, without checking outputs and targets; see `loss_sum`."""
    scores = outputs.float()
    wanted = targets.to(outputs.device)
    if objective.task == "tabular_regression":
        compare = functional.l1_loss if objective.loss == "mae" else functional.mse_loss
        return compare(scores.reshape(wanted.shape), wanted, reduction="sum")
    scores, wanted = scores.reshape(-1, scores.shape[-1]), wanted.reshape(-1)
    if objective.class_weights is None and objective.loss == "cross_entropy":
        return functional.cross_entropy(
            scores, wanted, reduction="sum", label_smoothing=objective.label_smoothing
        )
    each = _each(scores, wanted, objective)
    if objective.class_weights is not None:
        # The factor belongs to the sample: torch's own weights also change how label smoothing is spread.
        each = each * torch.tensor(objective.class_weights, device=each.device)[wanted]
    return each.sum()


def _each(scores: Tensor, wanted: Tensor, objective: Objective) -> Tensor:
    """Return the loss of each sample, ``[batch]``, for scores ``[batch, outputs]`` and classes ``[batch]``."""
    is_binary = scores.shape[1] == 1
    match objective.loss:
        case "bce" if is_binary:
            return functional.binary_cross_entropy_with_logits(scores[:, 0], wanted.float(), reduction="none")
        case "bce":
            truth = functional.one_hot(wanted, scores.shape[1]).float()
            return functional.binary_cross_entropy_with_logits(scores, truth, reduction="none").mean(1)
        case "hinge" if is_binary:
            return (1 - scores[:, 0] * (2 * wanted.float() - 1)).clamp(min=0)
        case "hinge":
            return functional.multi_margin_loss(scores, wanted, reduction="none")
        case _:
            return functional.cross_entropy(
                scores, wanted, reduction="none", label_smoothing=objective.label_smoothing
            )
