"""The tensors that travel between the shards of a model: what the blueprint says of their shape and type."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from share_compute.models.blueprint import Blueprint, Stage
from share_compute.specification import Precision
from share_compute.training.numbers import is_finite

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Expected:
    """What a tensor must be.

    Args:
        shape: of it; None where any shape is right.
        dtypes: that it may have.
        is_finite: whether all of its numbers must be finite.
    """

    shape: Shape | None
    dtypes: Collection[torch.dtype]
    is_finite: bool = True

    def misfit(self, tensor: Tensor) -> str | None:
        """Return what makes a tensor unusable on any machine, for people; None where nothing does."""
        if self.shape is not None and tuple(tensor.shape) != self.shape:
            return f"its shape is {list(tensor.shape)} in place of {list(self.shape)}"
        if tensor.dtype not in self.dtypes:
            wanted = " or ".join(sorted(_name(dtype) for dtype in self.dtypes))
            return f"its dtype is {_name(tensor.dtype)} in place of {wanted}"
        return None

    def misfit_of_some(self, tensor: Tensor) -> str | None:
        """Return what `misfit` does, for a tensor of other samples: their number and length are any."""
        shape = tuple(tensor.shape)
        if self.shape is not None and len(shape) == len(self.shape) and shape[-1:] == self.shape[-1:]:
            return Expected(shape, self.dtypes).misfit(tensor)
        return self.misfit(tensor)

    def has_numbers(self, tensor: Tensor) -> bool:
        """Return whether the numbers of a tensor are finite, where they must be."""
        return not self.is_finite or is_finite(tensor)


def numbers_in(precision: Precision) -> frozenset[torch.dtype]:
    """Return the types in which layers that compute in a precision hand on their outputs."""
    return frozenset({torch.float32, getattr(torch, precision)})


def boundary_shape(blueprint: Blueprint, layer: int, batch: int, length: int) -> Shape | None:
    """Return the shape of what enters a layer of the model, ``[batch, ...]``.

    Args:
        blueprint: of the whole model.
        layer: its place, from 1; what enters the first layer are samples.
        batch: samples of a microbatch.
        length: tokens of a sample, where the model is a language model.

    Returns:
        The shape; None where it cannot be told without data.
    """
    if blueprint.config is None:
        from share_compute.models.layers import shape_before  # noqa: PLC0415 - imports the blueprint

        return shape_before(blueprint, layer, batch)
    from share_compute.models.huggingface import hidden_size_of  # noqa: PLC0415 - transformers is slow to import

    size = hidden_size_of(blueprint.config)
    return None if size is None else (batch, length, size)


@dataclass(frozen=True, slots=True)
class Boundaries:
    """What may arrive at one shard in a training step.

    Args:
        activation: of a microbatch, from the stage before; None at the first stage.
        gradient: of what the shard returns, from the stage behind; None at the last stage.
    """

    activation: Expected | None = None
    gradient: Expected | None = None

    @classmethod
    def of(
        cls, stage: Stage, blueprint: Blueprint, batch: int, length: int, *, gradients_are_finite: bool
    ) -> Boundaries:
        """Return what may arrive at a stage.

        Args:
            stage: the shard.
            blueprint: of the whole model.
            batch: samples of a microbatch.
            length: tokens of a sample.
            gradients_are_finite: whether a gradient that is not finite is a fault. In float16 it is not: the loss scale
                follows from it.
        """
        shard, dtypes = stage.shard, numbers_in(blueprint.precision)
        shape: Callable[[int], Shape | None] = lambda layer: boundary_shape(blueprint, layer, batch, length)  # noqa: E731
        trains = stage.trains_before or any(each.requires_grad for each in stage.parameters().values())
        entering = None if shard.is_first else Expected(shape(shard.start), dtypes, gradients_are_finite)
        returned = None
        if not shard.is_last:
            # A stage before which nothing is trained gets a placeholder in place of a gradient.
            returned = Expected(shape(shard.stop) if trains else (1,), dtypes, gradients_are_finite)
        return cls(entering, returned)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
