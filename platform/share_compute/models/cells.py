"""Seeded dropout and activation checkpointing of layers.

The random numbers of a layer depend only on (seed, step, microbatch, layer). So a layer that is recomputed in the
backward pass draws the same numbers again.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Cell: TypeAlias = tuple[int, ...]
"""Key that seeds the dropout of a microbatch: (seed, step, microbatch)."""
Forward: TypeAlias = Callable[..., Any]
"""The ``forward`` of a layer."""

_INNER = "inner"
"""Attribute with the layer's own ``forward``, of the function with which `run_by_cell` replaces it."""


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit hash of ``parts``, for use as a seed."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def run_by_cell(
    layer: nn.Module, place: int, cell: Callable[[], Cell], *, draws: bool, recomputes: bool
) -> None:
    """Replace a layer's ``forward`` with one that seeds random numbers and can be recomputed.

    Args:
        layer: layer of the stage.
        place: index of the layer in the whole model.
        cell: function that returns the key of the microbatch that is being computed.
        draws: whether the layer draws random numbers.
        recomputes: whether the backward pass recomputes the layer from its inputs.
    """
    if not draws and not recomputes:
        return
    forward = layer.forward

    @functools.wraps(forward)
    def run(*arguments: Any, **options: Any) -> Any:
        now = cell()

        def compute(*given: Any, **named: Any) -> Any:
            if draws and layer.training:
                torch.manual_seed(derive_seed(*now, place))
            return vars(run)[_INNER](*given, **named)

        if recomputes and torch.is_grad_enabled():
            return checkpoint(compute, *arguments, use_reentrant=False, preserve_rng_state=False, **options)
        return compute(*arguments, **options)

    vars(run)[_INNER] = forward
    layer.forward = run


def replace_inner(layer: nn.Module, replacement: Callable[[Forward], Forward]) -> None:
    """Replace the computation of a layer; random numbers are still seeded, and the layer is still recomputed.

    Args:
        layer: layer of a stage.
        replacement: returns the new ``forward``, given the present one.
    """
    known = vars(layer.forward) if _INNER in getattr(layer.forward, "__dict__", {}) else None
    if known is None:
        layer.forward = replacement(layer.forward)
    else:
        known[_INNER] = replacement(known[_INNER])
