"""Stages and cost profiles of Hugging Face encoders that classify or embed texts, built with the models' own code.

Attention of an encoder needs the padding mask in every layer. Stages exchange only hidden states. So each stage sets
hidden states of padding to zero, and the next stage derives the mask from them. No other result depends on these hidden
states: attention gives padding no weight, the head reads only the first token, and pooling leaves padding out. The
hidden state of a token is never all zeros, since a layer ends with a norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from share_compute.models.blueprint import Blueprint
from share_compute.models.huggingface.decoder import HuggingFaceStage, PassThrough, trained_sketch
from share_compute.models.huggingface.encoder import Entrance
from share_compute.models.huggingface.parts import EncoderPartNames, PartNames
from share_compute.models.profiles.profile import (
    LayerProfile,
    ModelProfile,
    QuadraticGrowth,
    forward_only_before_training,
)
from share_compute.models.profiles.shape_estimate import ShapeEstimate

_HEAD_OPERATIONS = 10
"""Estimated kernel calls of a head with its loss, in the forward; the backward has twice as many."""


class TextEncoderStage(HuggingFaceStage):
    """One shard of an encoder that classifies or embeds texts.

    The first stage takes ids ``[batch, seq]``, other stages hidden states ``[batch, seq, hidden]`` that are zero for
    padding. The last stage returns logits ``[batch, classes]``, or vectors ``[batch, hidden]``.
    """

    def _keep(self, model: PreTrainedModel, outline: PartNames) -> None:
        assert isinstance(outline, EncoderPartNames)
        self._padding = self.objective.padding
        stack = outline.base.get_submodule(outline.layers)
        for index in range(outline.places.num_layers):
            if not self.shard.start <= index < self.shard.stop:
                del stack._modules[str(index)]  # noqa: SLF001 - deleting an item would renumber the later layers
        if not self.shard.is_first:
            setattr(outline.base, outline.embedding, Entrance())
        if not self.shard.is_last:
            for name in outline.closing:
                setattr(outline.base, name, None)
            for name in outline.heads:
                setattr(model, name, PassThrough())

    @property
    def layers(self) -> dict[int, nn.Module]:
        """The shard's layers, by their index in the whole model."""
        stack = self._base.get_submodule(self._stack)
        return {int(index): layer for index, layer in stack.named_children()}

    def run(self, inputs: Tensor, **options: Any) -> Tensor:
        """Compute as `compute` does, with ``options`` for the model (last shard) or its base model (other shards)."""
        if self.shard.is_first:
            assert self._padding is not None, "the data was read before"
            name, mask = "input_ids", torch.ne(inputs, self._padding)
        else:
            name, mask = "inputs_embeds", torch.ne(inputs, 0).any(-1)
        given = {name: inputs, "attention_mask": mask.long(), "return_dict": True, **options}
        if self.shard.is_last and not self._embeds:
            logits: Tensor = self.module(**given).logits
            return logits
        hidden: Tensor = self._base(**given)[0]
        if not self.shard.is_last:
            return hidden * mask.unsqueeze(-1)
        if self._pooling == "cls":
            return hidden[:, 0]
        return (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)


def profile_text_encoder(blueprint: Blueprint) -> ModelProfile:
    """Estimate the cost profile of an encoder that classifies or embeds texts from the shapes of its parts.

    Raises:
        UserError: the configuration is invalid, a frozen parameter does not exist, or all parameters are frozen.
    """
    model, outline = trained_sketch(blueprint)
    layers = list(outline.base.get_submodule(outline.layers).children())
    embedding = getattr(outline.base, outline.embedding)
    elsewhere = {parameter for part in (embedding, *layers) for parameter in part.parameters()}
    rest = [parameter for parameter in model.parameters() if parameter not in elsewhere]
    size = sum(parameter.numel() for parameter in rest)
    trained = [parameter.numel() for parameter in rest if parameter.requires_grad]
    head = LayerProfile(
        parameters=size,
        frozen=size - sum(trained),
        largest=max(trained, default=0),
        forward_flops=QuadraticGrowth(2.0 * size),
        backward_flops=QuadraticGrowth(4.0 * size),
        forward_operations=_HEAD_OPERATIONS,
        backward_operations=2 * _HEAD_OPERATIONS,
    )
    estimate = ShapeEstimate(model.config)
    parts = [estimate.embedding(embedding), *map(estimate.layer, layers), head]
    first, *between, last = forward_only_before_training(
        [part.for_rows(blueprint.objective.rows) for part in parts]
    )
    return ModelProfile(
        layers=tuple(between),
        embedding=first,
        head=last,
        counted=False,
        layer_types=tuple(type(layer).__name__ for layer in layers),
        places=outline.places,
    )
