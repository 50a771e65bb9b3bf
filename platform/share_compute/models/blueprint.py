"""Blueprints: descriptions of models without weights, from which stages are built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from share_compute.errors import UserError
from share_compute.files.strict import StrictModel
from share_compute.models.configuration import declared_config, model_vocab_size
from share_compute.models.objective import Objective, objective_of
from share_compute.specification import LayerSpec, LoraSpec, Precision, TrainJob

DIGIT_SHAPE = (64,)
"""Shape of a sample of the data set ``digits``: 8 x 8 pixels."""


class Blueprint(StrictModel):
    """The declared model (a Hugging Face configuration or a list of torch layers), and its training options."""

    config: dict[str, Any] | None = None
    """Hugging Face configuration, with ``model_type``; None for a list of layers."""
    layers: tuple[LayerSpec, ...] = ()
    precision: Precision = "float32"
    """Dtype of matrix products."""
    activation_checkpointing: bool = False
    """Whether only a layer's inputs are kept for its backward pass, which then computes the layer again."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, as patterns of stored names or ranges of layers; see `frozen_names`."""
    lora: LoraSpec | None = None
    """Adapters that are trained instead of the model's own weights."""
    objective: Objective = Objective()
    """Task and loss."""
    sample_shape: tuple[int, ...] = DIGIT_SHAPE
    """Shape of one sample; used only for a list of layers."""


def blueprint_of(
    spec: TrainJob,
    vocab_size: int | None,
    special_tokens: Mapping[str, int | None] | None = None,
    *,
    objective: Objective | None = None,
    sample_shape: tuple[int, ...] | None = None,
) -> Blueprint:
    """Return the blueprint of a job's model.

    Args:
        spec: the job.
        vocab_size: vocabulary size of the job's tokenizer, used if the model's configuration has none; None for
            declared layers.
        special_tokens: ids such as ``eos_token_id``, added to the configuration of a model that starts from random
            weights.
        objective: task and loss with the facts about the data; None before the data is read.
        sample_shape: shape of one sample for declared layers; None before the data is read.

    Raises:
        UserError: the model's configuration cannot be read or has an invalid ``vocab_size``, or its context window is
            shorter than ``training.sequence_length``.
    """
    model, training = spec.model, spec.training
    if model.layers is not None:
        return Blueprint(
            layers=model.layers,
            precision=training.precision,
            activation_checkpointing=training.activation_checkpointing,
            freeze=training.freeze,
            objective=objective or objective_of(spec),
            sample_shape=sample_shape or _expected_shape(spec),
        )
    config = declared_config(model)
    if model_vocab_size(model) is None:
        config["vocab_size"] = vocab_size
    length, window = training.sequence_length, config.get("max_position_embeddings")
    if isinstance(window, int) and length > window:
        raise UserError(
            f"sequence_length {length} is longer than the model's window of {window} tokens",
            hint=f"set training.sequence_length to {window} or less",
        )
    if model.path is None:
        config.update(special_tokens or {})
    return Blueprint(
        config=config,
        precision=training.precision,
        activation_checkpointing=training.activation_checkpointing,
        freeze=training.freeze,
        lora=training.lora,
        objective=objective or objective_of(spec),
    )


def _expected_shape(spec: TrainJob) -> tuple[int, ...]:
    """Return the shape of a sample before the data is read: of a table, the inputs of the first linear layer."""
    images = spec.data.images
    if images is not None:
        return (images.channels, images.height, images.width)
    if spec.data.table is None:
        return DIGIT_SHAPE
    wanted = (layer.options.get("in_features") for layer in spec.model.layers or () if layer.type == "linear")
    first = next(wanted, None)
    return (first,) if type(first) is int and first > 0 else DIGIT_SHAPE
