"""Checks of the tensors that the stages of a model exchange: shape, dtype and finite values."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from share_compute.errors import UserError
from share_compute.models.blueprint import Blueprint
from share_compute.models.numbers import is_finite
from share_compute.models.stage import Stage
from share_compute.specification import Precision
from share_compute.specification.boundaries import BoundaryCodec, BoundaryCompression

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Expected:
    """Requirements on a tensor that a member receives.

    Args:
        shape: required shape; None allows any.
        dtypes: allowed types.
        is_finite: whether all numbers of the tensor must be finite.
        codec: codec with which the tensor is sent.
    """

    shape: Shape | None
    dtypes: Collection[torch.dtype]
    is_finite: bool = True
    codec: BoundaryCodec = "none"

    def misfit(self, tensor: Tensor) -> str | None:
        """Return why a tensor's shape or dtype is wrong, as text for users; None if shape and dtype are right."""
        if self.shape is not None and tuple(tensor.shape) != self.shape:
            return f"its shape is {list(tensor.shape)} in place of {list(self.shape)}"
        if tensor.dtype not in self.dtypes:
            wanted = " or ".join(sorted(_name(dtype) for dtype in self.dtypes))
            return f"its dtype is {_name(tensor.dtype)} in place of {wanted}"
        return None

    def misfit_of_some(self, tensor: Tensor) -> str | None:
        """Return the same as `misfit`, but allow all dimensions except the last to have any size."""
        shape = tuple(tensor.shape)
        if self.shape is not None and len(shape) == len(self.shape) and shape[-1:] == self.shape[-1:]:
            return Expected(shape, self.dtypes).misfit(tensor)
        return self.misfit(tensor)

    def has_numbers(self, tensor: Tensor) -> bool:
        """Return whether all numbers of a tensor are finite; always True if ``is_finite`` is False."""
        return not self.is_finite or is_finite(tensor)


def numbers_in(precision: Precision) -> frozenset[torch.dtype]:
    """Return the dtypes allowed for outputs of layers that compute in ``precision``: that dtype and float32."""
    return frozenset({torch.float32, getattr(torch, precision)})


def boundary_shape(blueprint: Blueprint, layer: int, batch: int, length: int) -> Shape | None:
    """Return the shape of a layer's inputs, ``[batch, ...]``.

    Args:
        blueprint: blueprint of the whole model.
        layer: index of the layer, at least 1; the inputs of layer 0 are samples.
        batch: number of samples in a microbatch.
        length: number of tokens in a sample, for language models.

    Returns:
        The shape; None if the configuration has no hidden size, or if an earlier declared layer does not fit its input.

    Raises:
        UserError: the configuration is invalid, or an earlier declared layer has wrong options.
    """
    if blueprint.config is None:
        from share_compute.models.layers import shape_before  # noqa: PLC0415 - imports the blueprint

        return shape_before(blueprint, layer, batch)
    if blueprint.classifies_images:
        from share_compute.models.huggingface.image_classifier import hidden_shape_of  # noqa: PLC0415 - slow to import

        return (batch, *hidden_shape_of(blueprint.config, blueprint.sample_shape))
    from share_compute.models.huggingface.decoder import hidden_size_of  # noqa: PLC0415 - transformers is slow to import

    size = hidden_size_of(blueprint.config)
    return None if size is None else (batch * blueprint.objective.rows, length, size)


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Requirements on the tensors that one shard receives in a training step.

    Args:
        activation: requirements on a microbatch's activation from the previous stage; None at the first stage.
        gradient: requirements on the gradient of the shard's outputs from the next stage; None at the last stage.
    """

    activation: Expected | None = None
    gradient: Expected | None = None

    @classmethod
    def of(
        cls,
        stage: Stage,
        blueprint: Blueprint,
        batch: int,
        length: int,
        *,
        gradients_are_finite: bool,
        compression: BoundaryCompression,
    ) -> Boundaries:
        """Return the requirements on the tensors that a stage receives.

        Args:
            stage: the shard.
            blueprint: blueprint of the whole model.
            batch: number of samples in a microbatch.
            length: number of tokens in a sample.
            gradients_are_finite: whether all numbers of received activations and gradients must be finite.
            compression: codecs of activations and gradients.

        Raises:
            UserError: a tensor is compressed, and its shape does not follow from the model's configuration.
        """
        shard, dtypes = stage.shard, numbers_in(blueprint.precision)
        shape: Callable[[int], Shape | None] = lambda layer: boundary_shape(blueprint, layer, batch, length)  # noqa: E731
        trains = stage.trains_before or any(each.requires_grad for each in stage.parameters().values())

        def expected(layer: int, size: Shape | None) -> Expected:
            codec = compression.codec(layer)
            if size is None and codec != "none":
                raise UserError(
                    f"training.boundary_compression: the model does not say how many numbers pass layer {layer}",
                    hint="set training.boundary_compression: {name: none}",
                )
            return Expected(size, dtypes, gradients_are_finite, codec)

        entering = None if shard.is_first else expected(shard.start, shape(shard.start))
        returned = None
        if not shard.is_last:
            # If nothing up to this stage is trained, the next stage sends a tensor of shape (1,) instead of a gradient.
            returned = expected(shard.stop, shape(shard.stop) if trains else (1,))
        return cls(entering, returned)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
