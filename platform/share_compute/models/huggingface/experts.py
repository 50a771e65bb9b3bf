"""Experts of a mixture as one operation, of which a device can compute some experts.

transformers keeps the experts of a layer in one module. Each of its parameters has a row for each expert. The module's
inputs are all tokens, and the experts that a router chose for each token. Its code branches on these choices, or calls
products that cannot run without data. So layers are traced with one operation in place of this module.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


@torch.library.custom_op("share_compute::experts", mutates_args=())
def _experts(hidden: Tensor, index: Tensor, weights: Tensor, parameters: list[Tensor]) -> Tensor:
    raise NotImplementedError("this operation is only traced; `computed_experts` computes it")


@_experts.register_fake
def _(hidden: Tensor, _index: Tensor, _weights: Tensor, _parameters: list[Tensor]) -> Tensor:
    return torch.empty_like(hidden)


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds the experts of a mixture, with one row per expert in each parameter."""
    count = getattr(module, "num_experts", None)
    parameters = list(module.parameters())
    is_of_transformers = hasattr(module, "_is_expert_parallel")  # set by `use_experts_implementation`
    return (
        is_of_transformers
        and bool(parameters)
        and all(each.dim() > 1 and each.shape[0] == count for each in parameters)
    )


@contextmanager
def experts_as_operations(layer: nn.Module) -> Iterator[None]:
    """Return a context in which the experts of a layer are one operation, ``share_compute::experts``.

    The operation has an output on the meta device, and for fake tensors. It cannot be computed.
    """
    found = [module for module in layer.modules() if is_experts(module)]
    for module in found:
        module.forward = partial(_traced, module, module.forward)
    try:
        yield
    finally:
        for module in found:
            del module.forward


def _traced(module: nn.Module, original: Any, *arguments: Any, **options: Any) -> Any:
    given = [*arguments, *options.values()]
    is_known = len(given) == 3 and given[0].dim() == 2 and given[1].shape == given[2].shape
    if not is_known or given[1].is_floating_point():
        return original(*arguments, **options)
    hidden, index, weights = given
    return _experts(hidden, index, weights, list(module.parameters()))


def computed_experts(module: nn.Module, tensors: Sequence[Tensor], first: int) -> Tensor:
    """Return the weighted sum of the outputs of some experts for each token, ``[tokens, features]``.

    Each token is computed by those of these experts that the router chose for it. Tokens without a chosen expert get
    zeros. Other experts are not computed.

    Args:
        module: module with all experts.
        tensors: hidden states ``[tokens, features]``; experts of each token and their weights, both
            ``[tokens, chosen]``; and the rows of each parameter that belong to these experts.
        first: index of the first of these experts.
    """
    hidden, index, weights, *parameters = tensors
    count, (tokens, chosen) = parameters[0].shape[0], index.shape
    own = index.flatten() - first
    pairs = ((own >= 0) & (own < count)).nonzero().flatten()
    if not len(pairs):
        empty: Tensor = _NoRows.apply(hidden, weights, *parameters)  # type: ignore[no-untyped-call]
        return empty
    part = copy.copy(module)
    vars(part)["_parameters"] = dict(vars(module)["_parameters"])
    part.num_experts = count  # type: ignore[assignment]
    names = [name for name, _ in module.named_parameters()]
    rows = hidden.index_select(0, pairs // chosen)
    routes = own[pairs][:, None], weights.flatten()[pairs][:, None]
    outputs: Tensor = functional_call(part, dict(zip(names, parameters, strict=True)), (rows, *routes))
    # The outputs of a token are added in the order of its choices, as transformers does.
    summands = outputs.new_zeros(tokens * chosen, outputs.shape[-1]).index_copy(0, pairs, outputs)
    total: Tensor = summands.view(tokens, chosen, -1).sum(1)
    return total


class _NoRows(torch.autograd.Function):
    """Output of experts that no token reaches: zeros, with zero gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, *others)
        return torch.zeros_like(hidden)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(
            torch.zeros_like(each) if needed else None
            for each, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        )
