"""Records the calls that a Hugging Face model makes to its layers, and finds layers that are alike."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from share_compute.models.huggingface.decoder import PassThrough

LayerCall = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call to a layer."""


def pass_through(base: nn.Module, stack: nn.ModuleList, others: Sequence[str]) -> None:
    """Replace the layers of a model and the modules around them, so that the remaining code runs without weights.

    Args:
        base: base model.
        stack: the layers of the base model.
        others: names of modules before or after the layers.
    """
    for index, layer in enumerate(stack):
        stack[index] = PassThrough(layer)
    for name in others:
        setattr(base, name, PassThrough())


def recorded_calls(
    base: nn.Module, stack: nn.ModuleList, layers: Collection[int], hidden: Tensor, *, cached: bool
) -> dict[int, LayerCall]:
    """Run a model that `pass_through` changed; return the arguments of the calls to some layers, by layer index.

    Args:
        base: base model.
        stack: the layers of the base model.
        layers: indices of the layers.
        hidden: hidden states before the first layer, ``[batch, seq, hidden]``.
        cached: whether the model makes a cache for generation.
    """
    calls: dict[int, LayerCall] = {}

    def note(index: int, _: nn.Module, arguments: Any, options: Any) -> None:
        calls[index] = (arguments, options)

    with ExitStack() as hooks, torch.no_grad():
        for index in layers:
            hook = stack[index].register_forward_pre_hook(partial(note, index), with_kwargs=True)
            hooks.enter_context(hook)
        base(inputs_embeds=hidden, use_cache=cached, return_dict=True)
    return calls


def first_alike(layers: Sequence[nn.Module], kinds: Sequence[str] | None) -> list[int]:
    """Return, for each layer, the index of the first layer with the same kind and the same `_likeness`."""
    seen: dict[Hashable, int] = {}
    kinds = kinds if kinds is not None and len(kinds) == len(layers) else [""] * len(layers)
    return [
        seen.setdefault((kind, _likeness(layer)), index)
        for index, (kind, layer) in enumerate(zip(kinds, layers, strict=True))
    ]


def _likeness(layer: nn.Module) -> Hashable:
    """Return a key that is equal for layers with equal modules, attributes, shapes and trained parameters."""
    return tuple(
        (
            name,
            type(module),
            tuple(
                (key, value)
                for key, value in vars(module).items()
                if isinstance(value, str | int | float | bool | None)
                and "idx" not in key
                and "index" not in key
            ),
            tuple(
                (key, value.shape, value.requires_grad)
                for key, value in module.named_parameters(recurse=False)
            ),
        )
        for name, module in layer.named_modules()
    )
