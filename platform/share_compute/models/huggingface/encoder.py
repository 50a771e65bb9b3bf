"""One shard of a Hugging Face encoder, built with the model's own code.

A shard begins as the whole base model with large parameters on the meta device. The layers of other shards are removed.
Then the remaining parameters get memory. Modules keep their names in the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from share_compute.models.huggingface.decoder import materialize, sketch
from share_compute.models.huggingface.encoder_types import ENCODERS
from share_compute.models.profiles.profile import NOTHING, LayerProfile, ModelProfile
from share_compute.models.profiles.shape_estimate import ShapeEstimate, parameters_of
from share_compute.shards import Shard

_EMBEDDING = "embeddings"


class Entrance(nn.Module):
    """Replacement for a base model's embedding: it takes hidden states instead of ids, and returns them unchanged."""

    def forward(self, *given: Any, **named: Any) -> Tensor:
        """Return the first floating-point tensor among the arguments: the hidden states ``[1, tokens, hidden]``."""
        hidden: Tensor = next(
            value
            for value in (*given, *named.values())
            if isinstance(value, Tensor) and value.is_floating_point()
        )
        return hidden


def encoder_sketch(config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the whole base model without its pooler, with large parameters on the meta device.

    Raises:
        UserError: transformers cannot build a model from the configuration.
    """
    model = sketch(config, dtype, AutoModel)
    if hasattr(model, "pooler"):  # the pooler's output is not used
        model.pooler = None
    return model


class EncoderShard:
    """One shard of an encoder, for inference only.

    Args:
        config: Hugging Face configuration of the whole model; its ``model_type`` is in `ENCODERS`.
        shard: part of the model that this shard holds.
        device: device of the shard.
        dtype: dtype of the weights.

    Raises:
        UserError: transformers cannot build a model from the configuration.
    """

    def __init__(
        self, config: Mapping[str, Any], shard: Shard, device: torch.device, dtype: torch.dtype
    ) -> None:
        parts = ENCODERS[config["model_type"]]
        model = encoder_sketch(config, dtype)
        layers = model.get_submodule(parts.layers)
        assert isinstance(layers, nn.ModuleList)
        for index in range(len(layers)):
            if not shard.start <= index < shard.stop:
                del layers._modules[str(index)]  # noqa: SLF001 - deleting an item would renumber the later layers
        self.base = model
        self.embedding: nn.Module | None = model.get_submodule(_EMBEDDING) if shard.is_first else None
        """Embedding of the first shard, called with ``input_ids`` ``[1, tokens]`` of one text; None on later shards."""
        setattr(model, _EMBEDDING, Entrance())
        self._whole = [f"{parts.layers}.{index}" for index in range(shard.start, shard.stop)]
        if shard.is_last:
            self._whole += parts.closing
        else:
            for name in parts.closing:
                setattr(model, name, nn.Identity())
        for module in self.modules():
            materialize(module, device, is_filled_later=True)
            module.requires_grad_(requires_grad=False).eval()

    def modules(self) -> Iterator[nn.Module]:
        """Yield the embedding (first shard only) and the base model with the layers of this shard."""
        if self.embedding is not None:
            yield self.embedding
        yield self.base

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by stored name."""
        found: dict[str, Tensor] = dict(self.base.state_dict())
        if self.embedding is not None:
            found.update(self.embedding.state_dict(prefix=f"{_EMBEDDING}."))
        return found

    def take_over(self, other: EncoderShard) -> dict[str, Tensor]:
        """Move the modules that both shards hold from ``other`` to this shard; ``other`` must not be used afterwards.

        Args:
            other: another shard of the same model.

        Returns:
            The tensors that were not moved, by stored name; the caller must load their values.
        """
        taken = [path for path in self._whole if path in other._whole]
        for path in taken:
            self.base.set_submodule(path, other.base.get_submodule(path))
        if self.embedding is not None and other.embedding is not None:
            self.embedding = other.embedding
            taken.append(_EMBEDDING)
        beginnings = tuple(f"{path}." for path in taken)
        return {name: tensor for name, tensor in self.tensors().items() if not name.startswith(beginnings)}


def profile_encoder(config: Mapping[str, Any]) -> ModelProfile:
    """Estimate the cost profile of an encoder from the shapes of its parts.

    Args:
        config: Hugging Face configuration of the model; its ``model_type`` is in `ENCODERS`.

    Raises:
        UserError: transformers cannot build a model from the configuration.
    """
    model = encoder_sketch(config)
    layers = list(model.get_submodule(ENCODERS[config["model_type"]].layers).children())
    embedding = model.get_submodule(_EMBEDDING)
    estimate = ShapeEstimate(model.config)
    rest = parameters_of(model) - parameters_of(embedding) - sum(map(parameters_of, layers))
    return ModelProfile(
        layers=tuple(estimate.layer(layer).model_copy(update={"cache_numbers": NOTHING}) for layer in layers),
        embedding=estimate.embedding(embedding),
        head=LayerProfile(parameters=rest, forward_operations=1),
        counted=False,
    )
