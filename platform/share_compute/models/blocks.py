"""Torch modules of declared layers, of blocks of layers, and of the heads of several tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from share_compute.errors import UserError
from share_compute.models.batch_norm import BatchNorm1d, BatchNorm2d
from share_compute.models.blueprint import TaskHead
from share_compute.specification.layers import LayerSpec, PlacedLayer, expanded

MODULES: dict[str, Callable[..., nn.Module]] = {
    "adaptive_avg_pool2d": nn.AdaptiveAvgPool2d,
    "adaptive_max_pool2d": nn.AdaptiveMaxPool2d,
    "avg_pool2d": nn.AvgPool2d,
    "batch_norm1d": BatchNorm1d,
    "batch_norm2d": BatchNorm2d,
    "conv2d": nn.Conv2d,
    "dropout": nn.Dropout,
    "dropout2d": nn.Dropout2d,
    "embedding": nn.Embedding,
    "embedding_bag": nn.EmbeddingBag,
    "flatten": nn.Flatten,
    "gelu": nn.GELU,
    "group_norm": nn.GroupNorm,
    "layer_norm": nn.LayerNorm,
    "linear": nn.Linear,
    "max_pool2d": nn.MaxPool2d,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "unflatten": nn.Unflatten,
}
_REFUSED = {
    "device": "the plan chooses the machine of each layer",
    "inplace": "it would overwrite the input, which a shortcut may still need",
    "return_indices": "a layer returns one tensor",
}
"""Options of torch modules that declared layers cannot have, with the reason."""
_SIZES = frozenset(
    {
        "dilation", "embedding_dim", "groups", "in_channels", "in_features", "kernel_size", "normalized_shape",
        "num_channels", "num_embeddings", "num_features", "num_groups", "out_channels", "out_features", "output_size",
        "stride",
    }
)  # fmt: skip
"""Options that are at least 1. torch accepts some smaller ones, and fails later."""
_MISFITS = (RuntimeError, ValueError, LookupError, TypeError, ArithmeticError)
"""Errors of torch for inputs that do not fit a module."""
_WRONG_OPTIONS = (*_MISFITS, AssertionError, AttributeError)
"""Errors of torch for wrong options."""


class Chain(nn.ModuleDict):
    """Modules of layers that follow each other, by the layers' indices.

    Args:
        placed: layers by index.
        prefix: prefix of the layers' names in messages, such as ``3.layers.``.

    Raises:
        UserError: a layer has wrong options.
    """

    def __init__(self, placed: Mapping[int, PlacedLayer], prefix: str = "") -> None:
        self._labels = {str(index): f"{prefix}{index}" for index in placed}
        self._fields = {str(index): each.field for index, each in placed.items()}
        super().__init__({str(index): _built(each, f"{prefix}{index}") for index, each in placed.items()})

    def append(self, index: int, module: nn.Module, field: str) -> None:
        """Add a module after the layers.

        Args:
            index: index of the module in the whole model.
            module: the module.
            field: path of the module's field in the job file.
        """
        self._labels[str(index)], self._fields[str(index)] = str(index), field
        self.add_module(str(index), module)

    def forward(self, inputs: Tensor) -> Tensor:
        """Run the layers one after the other.

        Raises:
            UserError: a layer does not fit its input, or returns no numbers.
        """
        hidden = inputs
        for index, layer in self.items():
            shape = list(hidden.shape)
            try:
                hidden = layer(hidden)
            except torch.OutOfMemoryError:  # a RuntimeError, too
                raise
            except _MISFITS as failure:
                # A linear layer after images lacks a flatten layer.
                if isinstance(layer, nn.Linear) and len(shape) < 4 and shape[-1] != layer.in_features:
                    raise self._wrong_width(index, layer, shape) from failure
                raise UserError(
                    f"layer {self._labels[index]} does not fit its input of shape {shape}: {failure} "
                    f"({self._fields[index]})",
                    hint="make each layer's options fit the output of the layer before",
                ) from failure
            if 0 in hidden.shape[1:]:
                raise UserError(
                    f"layer {self._labels[index]} returns no numbers for an input of shape {shape} "
                    f"({self._fields[index]})",
                    hint="use smaller kernels and strides, or larger samples",
                )
        return hidden

    def _wrong_width(self, index: str, layer: nn.Linear, shape: list[int]) -> UserError:
        field = self._fields[index]
        return UserError(
            f"layer {self._labels[index]} does not fit its input of shape {shape}: it takes {layer.in_features} "
            f"numbers ({field})",
            hint=f"set {field}.options.in_features to {shape[-1]}",
        )


class Sequential(nn.Module):
    """A block of layers that follow each other. The model is not cut inside it.

    Args:
        spec: the block.
        field: path of the block's field in the job file.
        label: name of the block in messages.
    """

    def __init__(self, spec: LayerSpec, field: str, label: str) -> None:
        super().__init__()
        self._field, self._label = field, label
        self.layers = _inner(spec.layers or (), f"{field}.layers", f"{label}.layers.")

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output of the block's layers."""
        outputs: Tensor = self.layers(inputs)
        return outputs


class Residual(Sequential):
    """A block that adds its input, or a projection of its input, to the output of its layers.

    He et al., Deep Residual Learning for Image Recognition, https://arxiv.org/abs/1512.03385.
    """

    def __init__(self, spec: LayerSpec, field: str, label: str) -> None:
        super().__init__(spec, field, label)
        self.projection = (
            None
            if spec.projection is None
            else _inner(spec.projection, f"{field}.projection", f"{label}.projection.")
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the sum of the block's layers and its shortcut.

        Raises:
            UserError: the two have different shapes.
        """
        outputs = super().forward(inputs)
        shortcut = inputs if self.projection is None else self.projection(inputs)
        if outputs.shape != shortcut.shape:
            raise UserError(
                f"layer {self._label}: the layers return {list(outputs.shape)}, and the shortcut "
                f"{list(shortcut.shape)} ({self._field})",
                hint="give the residual block a projection that returns the shape of its layers",
            )
        return outputs + shortcut


class Heads(nn.Module):
    """The last layer of a model with several tasks: one head for each task. A microbatch passes one head.

    The tensors of a head are named after its task: ``layers.4.head_digit.0.weight`` if 4 layers come before.

    Args:
        heads: heads of all tasks, in their order.
        label: label of the layer in messages.

    Raises:
        UserError: a layer has wrong options.
    """

    def __init__(self, heads: Sequence[TaskHead], label: str) -> None:
        super().__init__()
        self.task = 0
        """Index of the task whose head computes."""
        self._names = [head.module for head in heads]
        for place, (name, head) in enumerate(zip(self._names, heads, strict=True)):
            field = f"tasks.{place}.layers"
            self.add_module(name, Chain(dict(enumerate(expanded(head.layers, field))), f"{label}.{name}."))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output of the present task's head."""
        outputs: Tensor = self.chains[self.task](inputs)
        return outputs

    @property
    def chains(self) -> list[nn.Module]:
        """The heads, in the order of the tasks."""
        return [self.get_submodule(name) for name in self._names]


_BLOCKS: dict[str, Callable[[LayerSpec, str, str], nn.Module]] = {
    "residual": Residual,
    "sequential": Sequential,
}


def draws(module: nn.Module) -> bool:
    """Return whether a module, or one inside it, draws random numbers in training."""
    return any(isinstance(part, nn.Dropout | nn.Dropout2d) for part in module.modules())


def _inner(layers: Sequence[LayerSpec], field: str, prefix: str) -> Chain:
    return Chain(dict(enumerate(expanded(layers, field))), prefix)


def _built(placed: PlacedLayer, label: str) -> nn.Module:
    field, spec = placed
    if spec.type in _BLOCKS:
        return _BLOCKS[spec.type](spec, field, label)
    kind = MODULES[spec.type]
    for name, reason in _REFUSED.items():
        if spec.options.get(name, False) is not False:
            raise UserError(
                f"layer {label} ({spec.type}) cannot have {name}: {reason} ({field})",
                hint=f"leave out {name}",
            )
    for name, value in spec.options.items():
        if name in _SIZES and any(size < 1 for size in (value if isinstance(value, list) else (value,))):
            raise UserError(
                f"layer {label} ({spec.type}) has wrong options: {name} is {value} ({field})",
                hint=f"make {name} at least 1",
            )
    try:
        return kind(**spec.options)
    except _WRONG_OPTIONS as failure:
        raise UserError(
            f"layer {label} ({spec.type}) has wrong options: {failure} ({field})",
            hint=f"give the arguments of torch.nn.{getattr(kind, '__name__', spec.type)}",
        ) from failure
