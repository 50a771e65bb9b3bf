"""Reduce the overhead of norms and of module calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

_EPSILONS = ("variance_epsilon", "eps")
"""Attribute names that models use for the epsilon of a norm."""
_TRIES = 8
"""Number of random rows on which a norm is compared with its replacement; each row has a different scale."""


class FusedNorm(nn.Module):
    """RMS norm in one operation: divide each row by its root mean square, then multiply by weights.

    Args:
        weight: ``[size]``.
        epsilon: added to the mean square.
    """

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self._options = (list(weight.shape), weight, epsilon)

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalize rows ``[..., size]``; return the same shape."""
        return rms_norm(inputs, *self._options)

    __call__ = forward


def call_directly(module: nn.Module) -> None:
    """Make calls of a module and its submodules go straight to ``forward``, without torch's search for hooks.

    Modules that have forward hooks, or whose class defines ``__call__``, are not changed.
    """
    direct: dict[type[nn.Module], type[nn.Module]] = {}
    for part in module.modules():
        kind = type(part)
        if part._forward_hooks or part._forward_pre_hooks or "__call__" in vars(kind):  # noqa: SLF001
            continue
        if kind not in direct:
            direct[kind] = type(kind.__name__, (kind,), {"__call__": kind.forward})
        part.__class__ = direct[kind]


def call_own(modules: Iterable[nn.Module]) -> None:
    """Make calls of modules use each module's own ``forward``, even after `call_directly`."""
    own: dict[type[nn.Module], type[nn.Module]] = {}
    for module in modules:
        kind = type(module)
        if kind not in own:
            own[kind] = type(kind.__name__, (kind,), {"__call__": _call_own})
        module.__class__ = own[kind]


def _call_own(module: nn.Module, *arguments: Any, **options: Any) -> Any:
    return module.forward(*arguments, **options)


def fuse_norms(module: nn.Module) -> None:
    """Replace submodules that compute an RMS norm by a `FusedNorm`, except instances of torch's own norm classes.

    A submodule is replaced if a `FusedNorm` gives the same outputs for random rows. The weights of the `FusedNorm` are
    those of the submodule, or 1 plus those of the submodule.
    """
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            fused = _fused(child)
            if fused is not None:
                setattr(part, name, fused)


def _fused(module: nn.Module) -> FusedNorm | None:
    weights = list(module.parameters())
    epsilons = [getattr(module, name) for name in _EPSILONS if isinstance(getattr(module, name, None), float)]
    if len(weights) != 1 or weights[0].dim() != 1 or len(epsilons) != 1 or list(module.children()):
        return None
    if list(module.buffers()) or isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return None
    weight = weights[0].detach()
    source = torch.Generator(weight.device).manual_seed(0)
    rows = torch.randn(_TRIES, len(weight), generator=source, dtype=torch.float32, device=weight.device)
    scales = torch.logspace(-4, 3, _TRIES, device=weight.device)[:, None]
    inputs = (rows * scales).to(weight.dtype)
    expected = module(inputs)
    for found in (weight, 1 + weight):
        fused = FusedNorm(found, epsilons[0])
        outputs = fused(inputs)
        if outputs.dtype == expected.dtype and torch.equal(outputs, expected):
            return fused
    return None
