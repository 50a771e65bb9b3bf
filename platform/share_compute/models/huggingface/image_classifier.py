"""Stages and cost profiles of Hugging Face models that classify images, built with the models' own code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageClassification, PreTrainedModel

from share_compute.models.blueprint import Blueprint
from share_compute.models.huggingface.decoder import HuggingFaceStage, PassThrough, trained_sketch
from share_compute.models.huggingface.hub_configuration import hub_configuration
from share_compute.models.huggingface.parts import PartNames
from share_compute.models.image_types import require_image_model, require_images
from share_compute.models.layers import profile_modules
from share_compute.models.profiles.profile import ModelProfile, forward_only_before_training, joined


class _Entrance(PassThrough):
    """Placeholder for the embedding of another stage: it takes hidden states instead of pixels."""

    def __init__(self) -> None:
        super().__init__()
        # The base model converts its input to the dtype of this weight.
        self.patch_embeddings = SimpleNamespace(projection=SimpleNamespace(weight=torch.empty(0)))


class ImageStage(HuggingFaceStage):
    """One shard of a classifier of images.

    The first stage takes ``[batch, channels, height, width]``, other stages hidden states ``[batch, tokens, hidden]``.
    The last stage returns logits ``[batch, classes]``.
    """

    def _keep(self, model: PreTrainedModel, outline: PartNames) -> None:
        super()._keep(model, outline)
        if not self.shard.is_first:
            setattr(outline.base, outline.embedding, _Entrance())

    def run(self, inputs: Tensor, **options: Any) -> Tensor:
        """Compute as `compute` does, with ``options`` for the model (last shard) or its base model (other shards)."""
        entry = None if self.shard.is_first else getattr(self._base, self._stack)[self.shard.start - 1]
        if entry is not None:
            entry.inputs = inputs
        try:
            if self.shard.is_last:
                logits: Tensor = self.module(pixel_values=inputs, **options).logits
                return logits
            hidden: Tensor = self._base(pixel_values=inputs, **options)[0]
            return hidden
        finally:
            if entry is not None:
                entry.inputs = None


def hidden_shape_of(config: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the hidden state of one sample, ``[tokens, hidden]``.

    Args:
        config: configuration of the model.
        shape: shape of a sample, ``[channels, height, width]``.

    Raises:
        UserError: the configuration is invalid.
    """
    return _hidden_shape(json.dumps(dict(config), sort_keys=True), shape)


@lru_cache(maxsize=16)
def _hidden_shape(config: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    whole = hub_configuration(json.loads(config))
    whole.num_hidden_layers = 0
    with torch.device("meta"):
        model = AutoModelForImageClassification.from_config(whole)
        return tuple(model.base_model.embeddings(torch.empty(1, *shape)).shape[1:])


def profile_images(blueprint: Blueprint) -> ModelProfile:
    """Return the cost profile of a classifier of images. Samples have one size, so costs are constants.

    Raises:
        UserError: the configuration does not describe a classifier of images that can be split, the samples do not have
            the model's input size, a frozen parameter does not exist, or all parameters are frozen.
    """
    require_image_model(blueprint.config or {})
    require_images(hub_configuration(blueprint.config or {}).to_dict(), blueprint.sample_shape)
    model, outline = trained_sketch(blueprint)
    embedding, layers = getattr(outline.base, outline.embedding), list(getattr(outline.base, outline.layers))
    setattr(outline.base, outline.layers, nn.ModuleList())
    setattr(outline.base, outline.embedding, _Entrance())
    found, loss, counted = profile_modules([embedding, *layers, _Closing(model)], blueprint)
    first, *between, last = forward_only_before_training(found)
    return ModelProfile(
        layers=tuple(between),
        embedding=first,
        head=joined([last, loss]),
        counted=counted,
        layer_types=tuple(type(layer).__name__ for layer in layers),
        places=outline.places,
    )


class _Closing(nn.Module):
    """The modules of a model after its last layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[batch, classes]`` for hidden states ``[batch, tokens, hidden]``."""
        logits: Tensor = self.model(pixel_values=hidden).logits
        return logits
