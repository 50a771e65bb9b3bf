"""Stages of models given as a declared list of torch layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from share_compute.errors import UserError
from share_compute.models.blueprint import Anatomy, Stage, derive_seed
from share_compute.planning.partitioning import Shard
from share_compute.specification import LayerSpec

_MODULES: dict[str, Callable[..., nn.Module]] = {
    "avg_pool2d": nn.AvgPool2d,
    "conv2d": nn.Conv2d,
    "dropout": nn.Dropout,
    "flatten": nn.Flatten,
    "gelu": nn.GELU,
    "layer_norm": nn.LayerNorm,
    "linear": nn.Linear,
    "max_pool2d": nn.MaxPool2d,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "unflatten": nn.Unflatten,
}


def _make(index: int, spec: LayerSpec) -> nn.Module:
    try:
        return _MODULES[spec.type](**spec.options)
    except (TypeError, ValueError, RuntimeError) as failure:
        raise UserError(
            f"layer {index} ({spec.type}) has wrong options: {failure}",
            mend=f"give the arguments of torch.nn.{_MODULES[spec.type].__name__}",
        ) from failure


class _Layers(nn.Module):
    """Layers [start, stop), named by their place in the whole model: ``layers.3.weight``."""

    def __init__(self, specs: Sequence[LayerSpec], start: int, stop: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): _make(index, specs[index]) for index in range(start, stop)})

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for index, layer in self.layers.items():
            try:
                hidden = layer(hidden)
            except (RuntimeError, ValueError, IndexError) as failure:
                raise UserError(
                    f"layer {index} does not fit its input of shape {list(hidden.shape)}: {failure}",
                    mend="make each layer's options fit the output of the layer before",
                ) from failure
        return hidden


class LayeredStage(Stage):
    """One shard of a declared list of layers."""

    def __init__(self, specs: Sequence[LayerSpec], shard: Shard, device: torch.device) -> None:
        self.shard = shard
        with torch.device("meta"):
            module = _Layers(specs, shard.start, shard.stop)
        self.module = module.to_empty(device=device)
        self.tied = {}
        self._key: tuple[int, ...] = ()
        for name, layer in module.layers.items():
            if isinstance(layer, nn.Dropout):
                layer.register_forward_pre_hook(self._seeder(int(name)))

    def _seeder(self, index: int) -> Callable[[nn.Module, Any], None]:
        def seed(module: nn.Module, _args: Any) -> None:
            if module.training:
                torch.manual_seed(derive_seed(*self._key, index))

        return seed

    def prepare_cell(self, *key: int) -> None:
        """Key dropout by (key, layer)."""
        self._key = key

    def forward(self, inputs: Tensor) -> Tensor:
        """Take the features ``[batch, ...]`` or the output of the stage before; return the output of its last layer."""
        outputs: Tensor = self.module(inputs)
        return outputs

    def initialize(self, seed: int) -> None:
        """Initialise each layer by torch's own rule, from (seed, its name)."""
        for name, module in self.module.named_modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                torch.manual_seed(derive_seed(seed, name))
                reset()


def dissect_layers(specs: Sequence[LayerSpec]) -> Anatomy:
    """Count a declared model's parameters, layer by layer."""
    with torch.device("meta"):
        layers = tuple(
            sum(math.prod(parameter.shape) for parameter in _make(index, spec).parameters())
            for index, spec in enumerate(specs)
        )
    return Anatomy(layers=layers, embedding=0, head=0)
