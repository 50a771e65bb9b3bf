"""Torch modules of declared layers, blocks of them, and heads of several tasks; reasons why a layer does not fit."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from share_compute.errors import UserError, first_line
from share_compute.models.batch_norm import BatchNorm, BatchNorm1d, BatchNorm2d
from share_compute.models.blueprint import TaskHead
from share_compute.quantities import clipped
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
"""Options that are whole numbers of at least 1. torch accepts some others, and fails later."""
_PAIRS = frozenset({"dilation", "kernel_size", "output_size", "padding", "stride"})
"""Options that are one number, or one for the height and one for the width."""
_MOST_SIZE = 2**31 - 1
_FIT = "make each layer's options fit the output of the layer before"
_MISFITS = (RuntimeError, ValueError, LookupError, TypeError, ArithmeticError)
"""Errors of torch for inputs that do not fit a module."""
_WRONG_OPTIONS = (*_MISFITS, AssertionError, AttributeError)
"""Errors of torch for wrong options."""
_IMAGE_DIMENSIONS = 4
"""Number of dimensions of a batch of images: ``[batch, channels, height, width]``.

torch takes an input of three dimensions for one image without a batch, so samples would be taken for channels.
"""
_MOST_SHOWN = 200
"""Most characters of what torch says that an error shows."""


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
            # Before the first step, meta tensors pass each layer. torch accepts some shapes that mix samples.
            if hidden.is_meta and (wrong := misfit(layer, hidden, self._fields[index])) is not None:
                raise self._unfit(index, shape, wrong)
            try:
                hidden = layer(hidden)
            except torch.OutOfMemoryError:  # a RuntimeError, too
                raise
            except _MISFITS as failure:
                wrong = misfit(layer, hidden, self._fields[index]) or UnfitLayer(_said(failure), _FIT)
                raise self._unfit(index, shape, wrong) from failure
            if 0 in hidden.shape[1:]:
                raise UserError(
                    f"layer {self._labels[index]} returns no numbers for an input of shape {shape} "
                    f"({self._fields[index]})",
                    hint="use smaller kernels and strides, or larger samples",
                )
        return hidden

    def _unfit(self, index: str, shape: list[int], wrong: UnfitLayer) -> UserError:
        return UserError(
            f"layer {self._labels[index]} does not fit its input of shape {shape}: {wrong.reason} "
            f"({self._fields[index]})",
            hint=wrong.hint,
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
    arguments = inspect.signature(kind).parameters.values()
    needed = [
        one.name for one in arguments if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    if lacking := [name for name in needed if name not in spec.options]:
        raise UserError(
            f"layer {label} ({spec.type}) lacks {', '.join(lacking)} ({field})",
            hint=f"give {field}.options: {', '.join(needed)}",
        )
    for name, reason in _REFUSED.items():
        if spec.options.get(name, False) is not False:
            raise UserError(
                f"layer {label} ({spec.type}) cannot have {name}: {reason} ({field})",
                hint=f"leave out {name}",
            )
    for name, value in spec.options.items():
        sizes = value if isinstance(value, list) else (value,)
        if name in _SIZES and not all(type(size) is int and 1 <= size <= _MOST_SIZE for size in sizes):
            raise UserError(
                f"layer {label} ({spec.type}) has wrong options: {name} is {value} ({field})",
                hint=f"make {name} a whole number from 1 to {_MOST_SIZE}",
            )
        if name in _PAIRS and isinstance(value, list) and len(value) != 2:
            raise UserError(
                f"layer {label} ({spec.type}) has wrong options: {name} is {value} ({field})",
                hint=f"give {name} one number, or two: for the height and for the width",
            )
    try:
        return kind(**spec.options)
    except _WRONG_OPTIONS as failure:
        raise UserError(
            f"layer {label} ({spec.type}) has wrong options: {_said(failure)} ({field})",
            hint=f"give the arguments of torch.nn.{getattr(kind, '__name__', spec.type)}",
        ) from failure


@dataclass(frozen=True, slots=True)
class UnfitLayer:
    """A reason why a layer does not fit its input.

    Args:
        reason: a clause that follows a colon.
        hint: what to change.
    """

    reason: str
    hint: str


def misfit(layer: nn.Module, inputs: Tensor, field: str) -> UnfitLayer | None:
    """Return why a layer does not fit its input; None if no reason is known.

    Args:
        layer: a module of `share_compute.models.blocks.MODULES`.
        inputs: its input, ``[batch, ...]``; only the shape and the type of the numbers count.
        field: path of the layer's field in the job file.
    """
    checks = (check for kinds, check in _CHECKS if isinstance(layer, kinds))
    try:
        return next(filter(None, (check(layer, inputs, field) for check in checks)), None)
    except (TypeError, ValueError):  # an option has a value of a wrong kind, which torch refuses
        return None


def _said(failure: Exception) -> str:
    return clipped(first_line(failure), _MOST_SHOWN)


def _of_ids(_layer: Any, inputs: Tensor, _field: str) -> UnfitLayer | None:
    if not inputs.is_floating_point():
        return None
    return UnfitLayer(
        "it takes whole numbers, such as token ids",
        "use linear for other numbers, or let the task read texts",
    )


def _of_images(_layer: Any, inputs: Tensor, _field: str) -> UnfitLayer | None:
    if inputs.dim() == _IMAGE_DIMENSIONS:
        return None
    return UnfitLayer(
        "it takes images, [batch, channels, height, width]",
        "put an unflatten layer before it, or use a layer that takes this shape",
    )


def _of_channels(layer: Any, inputs: Tensor, field: str) -> UnfitLayer | None:
    option = next(name for name in ("in_channels", "num_channels", "num_features") if hasattr(layer, name))
    takes, gets = getattr(layer, option), inputs.shape[1] if inputs.dim() > 1 else 1
    return None if takes == gets else UnfitLayer(f"it takes {takes} channels", _set(field, option, gets))


def _of_groups(layer: Any, inputs: Tensor, field: str) -> UnfitLayer | None:
    if math.prod(inputs.shape[1:]) > layer.num_groups:
        return None
    return UnfitLayer("each group has one number, which would become 0", _set(field, "num_groups", 1))


def _of_linear(layer: Any, inputs: Tensor, field: str) -> UnfitLayer | None:
    takes, gets = layer.in_features, inputs.shape[-1]
    if takes == gets:
        return None
    is_image = inputs.dim() == _IMAGE_DIMENSIONS
    hint = (
        "put a flatten layer between the images and this layer"
        if is_image
        else _set(field, "in_features", gets)
    )
    return UnfitLayer(f"it takes {takes} numbers", hint)


def _of_layer_norm(layer: Any, inputs: Tensor, field: str) -> UnfitLayer | None:
    takes, sample = list(layer.normalized_shape), list(inputs.shape[1:])
    gets = sample[-len(takes) :]
    if takes == gets:
        return None
    return UnfitLayer(
        f"it takes samples whose shape ends with {takes}", _set(field, "normalized_shape", gets)
    )


def _of_flatten(layer: Any, inputs: Tensor, field: str) -> UnfitLayer | None:
    start, end, dimensions = layer.start_dim, layer.end_dim, inputs.dim()
    first, last = (place + dimensions if place < 0 else place for place in (start, end))
    if not 0 <= first <= last < dimensions:
        return UnfitLayer(
            f"it has no dimensions {start} to {end}", f"leave out start_dim and end_dim of {field}.options"
        )
    if first == 0 < last:
        return UnfitLayer("dimension 0 is the batch, whose samples stay apart", _set(field, "start_dim", 1))
    return None


def _of_unflatten(layer: Any, inputs: Tensor, field: str) -> UnfitLayer | None:
    place = layer.dim + inputs.dim() if layer.dim < 0 else layer.dim
    if not 0 <= place < inputs.dim():
        return UnfitLayer(f"it has no dimension {layer.dim}", _set(field, "dim", 1))
    if place == 0:
        return UnfitLayer("dimension 0 is the batch, whose samples stay apart", _set(field, "dim", 1))
    sizes, gets = list(layer.unflattened_size), inputs.shape[place]
    product = math.prod(sizes)
    if product == gets or (sizes.count(-1) == 1 and product and gets % product == 0):
        return None
    return UnfitLayer(
        f"{gets} numbers cannot be arranged as {sizes}",
        f"let the product of {field}.options.unflattened_size be {gets}",
    )


def _of_padding(layer: Any, _inputs: Tensor, field: str) -> UnfitLayer | None:
    padding, kernel = _pair(layer.padding), _pair(layer.kernel_size)
    if all(pad <= size // 2 for pad, size in zip(padding, kernel, strict=True)):
        return None
    return UnfitLayer(
        f"its padding of {padding[0]} x {padding[1]} is more than half of its kernel",
        f"set {field}.options.padding to {min(kernel) // 2} or less",
    )


def _of_window(layer: Any, inputs: Tensor, _field: str) -> UnfitLayer | None:
    dilation = _pair(getattr(layer, "dilation", 1))
    spans = [step * (size - 1) + 1 for step, size in zip(dilation, _pair(layer.kernel_size), strict=True)]
    height, width = (size + 2 * pad for size, pad in zip(inputs.shape[2:], _pair(layer.padding), strict=True))
    # With ceil_mode, a window may end beyond the padded image by less than a stride.
    beyond = [step - 1 if getattr(layer, "ceil_mode", False) else 0 for step in _pair(layer.stride)]
    if spans[0] <= height + beyond[0] and spans[1] <= width + beyond[1]:
        return None
    return UnfitLayer(
        f"its kernel spans {spans[0]} x {spans[1]} positions, and the padded image has {height} x {width}",
        "use a smaller kernel, more padding, or larger samples",
    )


def _set(field: str, option: str, value: object) -> str:
    path = f"{field}.options.{option}"
    return f"set {path} to {value}"


def _pair(size: Any) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


_CHECKS: tuple[tuple[tuple[type[nn.Module], ...], Callable[[Any, Tensor, str], UnfitLayer | None]], ...] = (
    ((nn.Embedding, nn.EmbeddingBag), _of_ids),
    (
        (
            nn.AdaptiveAvgPool2d,
            nn.AdaptiveMaxPool2d,
            nn.AvgPool2d,
            BatchNorm2d,
            nn.Conv2d,
            nn.Dropout2d,
            nn.MaxPool2d,
        ),
        _of_images,
    ),
    ((nn.Conv2d, BatchNorm, nn.GroupNorm), _of_channels),
    ((nn.GroupNorm,), _of_groups),
    ((nn.Linear,), _of_linear),
    ((nn.LayerNorm,), _of_layer_norm),
    ((nn.Flatten,), _of_flatten),
    ((nn.Unflatten,), _of_unflatten),
    ((nn.AvgPool2d, nn.MaxPool2d), _of_padding),
    ((nn.AvgPool2d, nn.Conv2d, nn.MaxPool2d), _of_window),
)
"""Kinds of layers, and what to check for them, in this order."""
