"""Finds the module with the first output or gradient that is not finite.

The search is slow, because each check waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from share_compute.errors import UserError
from share_compute.models.numbers import is_finite
from share_compute.models.stage import Stage


@dataclass(frozen=True, slots=True)
class NonFiniteValue:
    """The first NaN or infinity that one microbatch produced in one stage."""

    way: Literal["forward", "backward"]
    stage: int
    microbatch: int
    name: str
    """Stored name of a module (forward: its output; backward: the gradient of its output) or of a parameter."""

    def error(self, step: int) -> UserError:
        """Return the error that the submitter gets."""
        return UserError(
            f"numbers are not finite at step {step}: first {'output of' if self.way == 'forward' else 'gradient at'} "
            f"{self.name} (microbatch {self.microbatch})",
            step=step,
            hint="lower the learning rate, clip gradients (training.max_gradient_norm), or look at the data",
        )


def find_nonfinite(
    stage: Stage,
    place: int,
    microbatch: int,
    entering: Tensor,
    gradient: Tensor | Callable[[Tensor], Tensor],
) -> NonFiniteValue | None:
    """Rerun one microbatch in a stage, and return the first value that is not finite; None if there is none.

    If ``entering`` is not finite, an earlier stage has the cause, so the result is None. If ``gradient`` is a tensor
    that is not finite, a later stage has the cause, so only the forward is checked.

    ``parameter.grad`` is not changed. Call `Stage.prepare_cell` first, so that dropout drops the same values.

    Args:
        stage: stage with the weights of the step.
        place: index of the stage; copied into the result.
        microbatch: id of the microbatch; copied into the result.
        entering: input of the stage.
        gradient: gradient of the stage's output; for the last stage, a function from its output to the loss.
    """
    if not is_finite(entering):
        return None
    found: list[tuple[Literal["forward", "backward"], str]] = []
    parameters = [
        (name, parameter) for name, parameter in stage.parameters().items() if parameter.requires_grad
    ]
    with ExitStack() as hooks:
        for name, module in stage.module.named_modules():
            if not list(module.children()) or module in stage.layers.values():
                hook = partial(_check_outputs, found, stage.stored_name(name))
                hooks.enter_context(module.register_forward_hook(hook))
        leaf = entering.detach()
        if leaf.is_floating_point() and stage.trains_before:
            leaf.requires_grad_()
        outputs = stage.forward(leaf)
        inputs: list[Tensor] = [parameter for _, parameter in parameters]
        inputs += [leaf] if leaf.requires_grad else []
        gradients: tuple[Tensor | None, ...] = ()
        if not found and outputs.requires_grad and inputs:
            target = gradient(outputs) if callable(gradient) else outputs
            given = None if callable(gradient) else gradient
            if given is None or is_finite(given):
                gradients = torch.autograd.grad(target, inputs, given, allow_unused=True)
    for (name, _), value in zip(parameters, gradients, strict=False):
        if value is not None and not is_finite(value):
            found.append(("backward", name))
    return NonFiniteValue(found[0][0], place, microbatch, found[0][1]) if found else None


def first_of(findings: Iterable[NonFiniteValue | None]) -> NonFiniteValue | None:
    """Return the finding that comes first in the order of computation; None if there is none.

    The forward pass goes from the first stage to the last, then the backward pass from the last to the first.
    """
    known = [finding for finding in findings if finding is not None]
    return min(
        known,
        key=lambda finding: (
            finding.way == "backward",
            finding.stage if finding.way == "forward" else -finding.stage,
            finding.microbatch,
        ),
        default=None,
    )


def _check_outputs(
    found: list[tuple[Literal["forward", "backward"], str]],
    name: str,
    _module: nn.Module,
    _inputs: Any,
    outputs: Any,
) -> None:
    for value in tree_iter(outputs):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        if not is_finite(value):
            found.append(("forward", name))
        elif value.requires_grad:
            value.register_hook(partial(_check_gradient, found, name))  # type: ignore[no-untyped-call]


def _check_gradient(
    found: list[tuple[Literal["forward", "backward"], str]], name: str, gradient: Tensor
) -> None:
    if not is_finite(gradient):
        found.append(("backward", name))
