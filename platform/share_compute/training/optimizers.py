"""Build optimizers and learning-rate schedules by name, and save and restore an optimizer's state as named tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR

from share_compute.errors import UserError
from share_compute.models.batch_norm import BatchNorm
from share_compute.models.storage.slots import slot_name, split_name
from share_compute.specification import OptimizerName, OptimizerSpec, TrainingSpec
from share_compute.synchronization.branch import is_branch_slot

_WARM_UP = "constant_with_warmup"
"""Schedule whose warm-up reduce_on_plateau has."""
_NO_DECAY = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Patterns of names of parameters without weight decay (``get_decay_parameter_names`` in ``transformers``)."""


def build_optimizer(
    spec: OptimizerSpec, parameters: Iterable[nn.Parameter], undecayed: Collection[nn.Parameter] = ()
) -> Optimizer:
    """Return the torch optimizer that ``spec`` names, with fused kernels for SGD, Adam and AdamW.

    Args:
        spec: name and options of the optimizer.
        parameters: parameters that are trained.
        undecayed: parameters without weight decay and L1 penalty, unless ``spec.decays`` is "all"; see
            `undecayed_parameters`.
    """
    every, without = list(parameters), set() if spec.decays == "all" else set(undecayed)
    optimizer = _built(spec, _groups(spec, every, without))
    if spec.l1:
        penalized = [parameter for parameter in every if parameter not in without]
        optimizer.register_step_pre_hook(lambda *_: _penalize(penalized, spec.l1))
    return optimizer


@torch.no_grad()
def _penalize(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Add the subgradient of ``factor * abs(parameter).sum()`` to the gradients; it is 0 where a parameter is 0."""
    for parameter in parameters:
        if parameter.grad is not None:
            # The product is exact. With `alpha`, kernels may round once or twice, depending on the position of the
            # element.
            parameter.grad.add_(parameter.sign().mul_(factor))


def _built(spec: OptimizerSpec, given: list[dict[str, Any]]) -> Optimizer:
    rate, decay = spec.learning_rate, spec.weight_decay
    match spec.name:
        case OptimizerName.sgd:
            return SGD(given, lr=rate, weight_decay=decay, fused=True)
        case OptimizerName.momentum:
            return SGD(given, lr=rate, weight_decay=decay, momentum=spec.momentum, fused=True)
        case OptimizerName.adagrad:
            return Adagrad(given, lr=rate, weight_decay=decay, eps=spec.epsilon)
        case OptimizerName.rmsprop:
            return RMSprop(given, lr=rate, weight_decay=decay, eps=spec.epsilon, momentum=spec.momentum)
        case OptimizerName.adam:
            return Adam(given, lr=rate, weight_decay=decay, betas=spec.betas, eps=spec.epsilon, fused=True)
        case OptimizerName.adamw:
            return AdamW(given, lr=rate, weight_decay=decay, betas=spec.betas, eps=spec.epsilon, fused=True)


def _groups(
    spec: OptimizerSpec, parameters: list[nn.Parameter], undecayed: set[nn.Parameter]
) -> list[dict[str, Any]]:
    if not undecayed or not spec.weight_decay:
        return [{"params": parameters}]
    with_decay = [parameter for parameter in parameters if parameter not in undecayed]
    without = [parameter for parameter in parameters if parameter in undecayed]
    groups: list[dict[str, Any]] = [{"params": with_decay}, {"params": without, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def undecayed_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the biases and the parameters of norms, which the trainer of Hugging Face excludes from weight decay."""
    from transformers.trainer_pt_utils import get_parameter_names  # noqa: PLC0415 - slow to import

    decayed = set(get_parameter_names(module, [nn.LayerNorm, nn.GroupNorm, BatchNorm], list(_NO_DECAY)))
    return [parameter for name, parameter in module.named_parameters() if name not in decayed]


def learning_rates(spec: TrainingSpec) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, counted from 1.

    With reduce_on_plateau, it is the rate before the first reduction; `Plateau` applies the reductions.

    Raises:
        UserError: ``transformers`` does not accept the options of the schedule.
    """
    from transformers import get_scheduler  # noqa: PLC0415 - slow to import, and only trainers need it

    bystander = SGD([nn.Parameter(torch.zeros(1))], lr=spec.optimizer.learning_rate)
    try:
        schedule: LambdaLR = get_scheduler(
            _WARM_UP if spec.schedule.plateau is not None else spec.schedule.name,
            bystander,
            num_warmup_steps=spec.schedule.warmup_steps,
            num_training_steps=spec.steps,
            scheduler_specific_kwargs={} if spec.schedule.plateau is not None else spec.schedule.arguments,
        )
    except ValueError as failure:
        raise UserError(
            f"training.schedule: {failure}", hint="fix training.schedule.options, or leave them out"
        ) from failure
    factor = schedule.lr_lambdas[0]
    return lambda step: spec.optimizer.learning_rate * float(factor(step - 1))


def optimizer_tensors(optimizer: Optimizer, names: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the optimizer's state as ``{"<parameter>::<slot>": tensor}``; scalars are 0-dimensional tensors."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in names.items():
        for slot, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                tensors[slot_name(name, slot)] = torch.as_tensor(value)
    return tensors


def restore_optimizer(
    optimizer: Optimizer, names: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Restore the state that `optimizer_tensors` returned, and ignore the state of a `BranchState`.

    torch would take unknown slots of a parameter for an initialized state.
    """
    for key, value in tensors.items():
        if is_branch_slot(key):
            continue
        name, slot = split_name(key)
        parameter = names[name]
        # The step counter is on the CPU, except for fused kernels, which read it on the parameter's device.
        near = value.dim() > 0 or bool(optimizer.param_groups[0].get("fused"))
        place = value.to(parameter.device if near else "cpu", copy=True)
        optimizer.state[parameter][slot] = place
