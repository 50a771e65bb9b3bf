"""How a stage runs a layer for one cell: its randomness is the cell's, and its inside may be computed twice.

Whatever a layer draws (dropout) follows from (seed, step, microbatch, layer). So a layer that is computed again on the
way back, when others have drawn in between, draws the same again, and no state of a generator is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from share_compute.models.blueprint import derive_seed

Cell: TypeAlias = tuple[int, ...]
"""(seed, step, microbatch)."""


def run_by_cell(
    layer: nn.Module, place: int, cell: Callable[[], Cell], *, draws: bool, recomputes: bool
) -> None:
    """Make a layer's forward that of a cell.

    Args:
        layer: of the stage.
        place: where it is in the whole model.
        cell: tells the cell that is computed now.
        draws: whether there is randomness in it.
        recomputes: whether only its inputs are kept for the backward.
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
            return forward(*given, **named)

        if recomputes and torch.is_grad_enabled():
            return checkpoint(compute, *arguments, use_reentrant=False, preserve_rng_state=False, **options)
        return compute(*arguments, **options)

    layer.forward = run
