"""Batch norm whose results do not depend on the plan; see docs/decisions/0025-statistics-are-carried-like-gradients.md.

Running statistics are parameters. The backward pass of a microbatch gives each statistic the gradient ``running -
observed``. So observed statistics are summed in the fixed order of gradients, and reach backups with the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_MEAN, _VARIANCE = "running_mean", "running_var"


class BatchNorm(nn.Module):
    """Batch norm over the samples of a microbatch, and over all positions of a channel.

    Ioffe and Szegedy, Batch Normalization, https://arxiv.org/abs/1502.03167. Parameters have the names that torch uses.
    Frozen running statistics are also used for normalization in training.

    Args:
        num_features: number of channels.
        eps: value that is added to variances.
        momentum: weight of a step's statistics in the running statistics, above 0 and at most 1.
        affine: whether the outputs are scaled and shifted by trained weights.

    Raises:
        ValueError: an option is out of range.
    """

    dimensions: tuple[int, ...]
    """Allowed numbers of dimensions of the input ``[batch, channels, ...]``."""

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, *, affine: bool = True
    ) -> None:
        super().__init__()
        if not 0 < momentum <= 1:
            raise ValueError(f"momentum must be above 0 and at most 1, not {momentum}")
        if not eps > 0:
            raise ValueError(f"eps must be above 0, not {eps}")
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.weight = nn.Parameter(torch.empty(num_features)) if affine else None
        self.bias = nn.Parameter(torch.empty(num_features)) if affine else None
        self.running_mean = nn.Parameter(torch.empty(num_features))
        self.running_var = nn.Parameter(torch.empty(num_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set means and biases to 0, variances and weights to 1."""
        with torch.no_grad():
            for zeros in (self.bias, self.running_mean):
                if zeros is not None:
                    zeros.zero_()
            for ones in (self.weight, self.running_var):
                if ones is not None:
                    ones.fill_(1.0)

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalize the microbatch, ``[batch, channels, ...]``.

        Raises:
            ValueError: the input has another number of dimensions.
        """
        if inputs.dim() not in self.dimensions:
            wanted = " or ".join(map(str, self.dimensions))
            raise ValueError(f"the input must have {wanted} dimensions with the batch")
        observes = self.training and self.running_mean.requires_grad and self.running_var.requires_grad
        known = (None, None) if observes else (self.running_mean.detach(), self.running_var.detach())
        # torch's stub counts one argument less.
        outputs: Tensor = torch.batch_norm(  # type: ignore[call-arg]
            inputs, self.weight, self.bias, *known, observes, 0.0, self.eps, torch.backends.cudnn.enabled
        )
        if not observes:
            return outputs
        with torch.no_grad():
            others = [dimension for dimension in range(inputs.dim()) if dimension != 1]
            variance, mean = torch.var_mean(inputs.float(), others, correction=1)
        recorded: Tensor = _Recorded.apply(  # type: ignore[no-untyped-call]
            outputs, self.running_mean, self.running_var, mean, variance
        )
        return recorded


class BatchNorm1d(BatchNorm):
    """Batch norm of ``[batch, channels]`` or ``[batch, channels, length]``."""

    dimensions = (2, 3)


class BatchNorm2d(BatchNorm):
    """Batch norm of ``[batch, channels, height, width]``."""

    dimensions = (4,)


class _Recorded(torch.autograd.Function):
    """Identity whose backward gives the running statistics the gradient ``running - observed``."""

    @staticmethod
    def forward(
        context: Any,
        outputs: Tensor,
        mean: Tensor,
        variance: Tensor,
        seen_mean: Tensor,
        seen_variance: Tensor,
    ) -> Tensor:
        context.save_for_backward(mean - seen_mean, variance - seen_variance)
        return outputs.view_as(outputs)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (gradient, *context.saved_tensors, None, None)


def running_statistics(module: nn.Module) -> dict[str, float]:
    """Return the momentum of each running statistic that training updates, by the name of its parameter."""
    found: dict[str, float] = {}
    for name, part in module.named_modules():
        if isinstance(part, BatchNorm):
            for leaf in (_MEAN, _VARIANCE):
                if getattr(part, leaf).requires_grad:
                    found[f"{name}.{leaf}" if name else leaf] = part.momentum
    return found


@torch.no_grad()
def update_statistic(
    name: str, running: Tensor, gradient: Tensor, momentum: float, microbatches: int
) -> None:
    """Move a running statistic towards the mean of the statistics of a step's microbatches.

    Differences are rounded, so their mean can exceed a variance near 0. Variances stay at least 0.

    Args:
        name: name of the statistic's parameter.
        running: the statistic, which is changed.
        gradient: sum of ``running - observed`` over the microbatches of the step.
        momentum: weight of the step.
        microbatches: number of microbatches in the step.
    """
    # Two operations, each of which rounds alike at every place of a tensor. A fused operation may round the last
    # elements differently.
    running.sub_(gradient * (momentum / microbatches))
    if name.rpartition(".")[2] == _VARIANCE:
        running.clamp_(min=0)


def update_statistics(
    parameters: Mapping[str, nn.Parameter], momenta: Mapping[str, float], microbatches: int
) -> None:
    """Update running statistics with their gradients; see `update_statistic`.

    Args:
        parameters: all parameters by name.
        momenta: momentum of each running statistic by name.
        microbatches: number of microbatches in the step.
    """
    for name, momentum in momenta.items():
        gradient = parameters[name].grad
        assert gradient is not None
        update_statistic(name, parameters[name], gradient, momentum, microbatches)
