"""Losses of all tasks, summed over the samples of a microbatch.

The loss of a step is the sum over its microbatches, divided by the number of samples, so it does not depend on the
plan.
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
        targets: class or token ids, ``[...]``; of a regression, scaled values; of texts, see `selected`.
            Class ids on a GPU are read, which synchronizes the GPU.
        objective: task and loss.

    Raises:
        UserError: the model's outputs do not fit the targets.
    """
    if objective.task in ("tabular_regression", "embedding") or objective.classes is not None:
        require_outputs(selected(outputs, targets, objective)[0], objective)
    else:
        classes = outputs.shape[-1]
        if targets.numel() and int(targets.max()) >= classes:
            raise UserError(
                f"the model's last layer has {classes} outputs, but the data has class {int(targets.max())}",
                hint=f"give the last layer at least {int(targets.max()) + 1} outputs",
            )
    return summed_loss(outputs, targets, objective)


def training_loss(outputs: Tensor, targets: Tensor, objective: Objective) -> tuple[Tensor, int]:
    """Return the loss summed over all targets of a microbatch, times its task's weight, and the number of targets.

    With `Objective.counts_samples`, return the sum of the samples' mean losses, and the number of samples.

    Raises:
        UserError: as `loss_sum` does.
    """
    loss, count = loss_sum(outputs, targets, objective), target_count(targets, objective)
    if objective.counts_samples:
        loss, count = loss * (len(targets) / count), len(targets)
    return (loss if objective.weight == 1.0 else loss * objective.weight), count


def selected(outputs: Tensor, targets: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """Return the outputs and the targets that the loss compares.

    Except for texts, these are the arguments themselves. The targets of texts with labels are ``[batch, 2]``: the class
    of a text, and the place of its last token. The targets of pairs are the places of the last tokens of both texts.
    Outputs for each token, ``[texts, seq, outputs]``, become those of the last token. So padding, which follows the
    last token, has no part in the loss of a causal model.

    Args:
        outputs: outputs of the last layer.
        targets: targets of the samples.
        objective: task and loss.
    """
    if not objective.reads_text:
        return outputs, targets
    wanted = targets.to(outputs.device)
    last = wanted.reshape(-1) if objective.task == "embedding" else wanted[:, 1]
    if outputs.dim() > 2:
        outputs = outputs[torch.arange(len(outputs), device=outputs.device), last]
    return outputs, targets if objective.task == "embedding" else wanted[:, 0]


def target_count(targets: Tensor, objective: Objective) -> int:
    """Return the number of targets over which the mean loss is taken: samples, or tokens of language models."""
    return len(targets) if objective.reads_text else targets.numel()


def similarities(outputs: Tensor, objective: Objective) -> Tensor:
    """Return the cosine of each first text with each second text of a microbatch, over the temperature: ``[n, n]``.

    Args:
        outputs: vectors of both texts of each pair, ``[2 * n, size]``.
        objective: task and loss.
    """
    first, second = functional.normalize(outputs.float(), dim=-1).reshape(-1, 2, outputs.shape[-1]).unbind(1)
    return first @ second.T / objective.temperature


def require_outputs(outputs: Tensor, objective: Objective) -> None:
    """Raise UserError if the outputs of a classifier with a known number of classes, or of a regression, do not fit.

    Args:
        outputs: outputs of the last layer for a microbatch, ``[batch, ...]``; may be on the meta device.
        objective: task and loss.
    """
    shape, classes = list(outputs.shape[1:]), objective.classes
    if objective.task == "embedding":
        if len(shape) != 1:
            raise UserError(
                f"the model's last layer returns {shape or 'one number'} for each text",
                hint="let model.layers end with one vector for each text, such as that of embedding_bag or linear",
            )
        return
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
    if objective.task == "embedding":
        # InfoNCE (van den Oord et al. 2018, arXiv 1807.03748): the negatives are the second texts of the microbatch.
        cosines = similarities(selected(outputs, targets, objective)[0], objective)
        own = torch.arange(len(cosines), device=cosines.device)
        return functional.cross_entropy(cosines, own, reduction="sum")
    outputs, targets = selected(outputs, targets, objective)
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
        # Weights are applied per sample, because torch's own class weights also change how label smoothing is spread.
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
