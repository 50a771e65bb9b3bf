"""Optimizers and learning-rate schedules by name, and their state as named tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR

from share_compute.specification import OptimizerName, OptimizerSpec, TrainingSpec

_SEPARATOR = "::"


def build_optimizer(spec: OptimizerSpec, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the torch optimizer that ``spec`` names; fused kernels where torch has them."""
    rate, decay = spec.learning_rate, spec.weight_decay
    given = list(parameters)
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


def learning_rates(spec: TrainingSpec) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, counted from 1: a resumed job needs no state for it."""
    from transformers import get_scheduler  # noqa: PLC0415 - slow to import, and only trainers need it

    bystander = SGD([nn.Parameter(torch.zeros(1))], lr=spec.optimizer.learning_rate)
    schedule: LambdaLR = get_scheduler(
        spec.schedule.name,
        bystander,
        num_warmup_steps=spec.schedule.warmup_steps,
        num_training_steps=spec.steps,
    )
    factor = schedule.lr_lambdas[0]
    return lambda step: spec.optimizer.learning_rate * float(factor(step - 1))


def optimizer_tensors(optimizer: Optimizer, names: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the state as ``{"<parameter>::<slot>": tensor}``; scalars are tensors of no dimension."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in names.items():
        for slot, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                tensors[f"{name}{_SEPARATOR}{slot}"] = torch.as_tensor(value)
    return tensors


def parameter_of(name: str) -> str:
    """Return the parameter that a tensor of the optimizer's state belongs to."""
    return name.partition(_SEPARATOR)[0]


def restore_optimizer(
    optimizer: Optimizer, names: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Put back what `optimizer_tensors` took."""
    for key, value in tensors.items():
        name, slot = key.split(_SEPARATOR)
        parameter = names[name]
        # The step counter stays on the CPU, but for the fused kernels, which read it where they run.
        near = value.dim() > 0 or bool(optimizer.param_groups[0].get("fused"))
        place = value.to(parameter.device if near else "cpu", copy=True)
        optimizer.state[parameter][slot] = place
