"""Blueprints: descriptions of models without weights, from which stages are built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from share_compute.errors import UserError
from share_compute.files.strict import StrictModel
from share_compute.models.configuration import (
    declared_config,
    is_trainable_encoder,
    model_vocab_size,
    require_no_auxiliary_loss,
    require_positions,
    require_single_texts,
)
from share_compute.models.image_types import with_image_size
from share_compute.models.objective import Objective, objective_of
from share_compute.specification import LayerSpec, LoraSpec, Precision, TrainJob
from share_compute.specification.layers import EMBEDDINGS, every_module, expanded

DIGIT_SHAPE = (64,)
"""Shape of a sample of the data set ``digits``: 8 x 8 pixels."""


class TaskHead(StrictModel):
    """Head and objective of one of several tasks."""

    name: str
    objective: Objective
    layers: tuple[LayerSpec, ...] = ()
    """Layers after those that the tasks share; empty for a single task, whose layers are those of the model, and for
    tasks that share a Hugging Face model."""

    @property
    def module(self) -> str:
        """Name of the module that holds the head."""
        return f"head_{self.name}"


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
    """Shape of one sample; used only for a list of layers and for images."""
    heads: tuple[TaskHead, ...] = ()
    """Heads of a job with ``tasks``; ``objective`` is that of the first. Empty for other jobs."""
    pooling: Literal["mean", "cls", "last"] = "mean"
    """Tokens whose hidden states are the vector of a text: the mean of all, the first, or the last one of a decoder.

    Used only for embeddings of a Hugging Face model.
    """
    tiles: tuple[int, int] | None = None
    """Tiles above and beside each other in which the first layer, a block, is computed; None computes it whole."""

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """Task and loss of each task, in their order."""
        return tuple(head.objective for head in self.heads) or (self.objective,)

    @property
    def whole_objective(self) -> Objective:
        """Objective that determines the class of a Hugging Face model; several tasks share a language model."""
        return Objective() if self.has_heads else self.objective

    @property
    def num_declared(self) -> int:
        """Number of declared layers, with repetitions; the heads of several tasks are one layer, the last one."""
        return len(expanded(self.layers)) + self.has_heads

    @property
    def has_heads(self) -> bool:
        """Whether the model has the heads of several tasks. In declared layers, the heads are the last layer."""
        return len(self.heads) > 1

    @property
    def classifies_images(self) -> bool:
        """Whether the model is a Hugging Face model that classifies images."""
        return self.config is not None and self.whole_objective.task == "image_classification"

    @property
    def uses_encoder(self) -> bool:
        """Whether the model is a Hugging Face encoder that classifies or embeds texts."""
        return self.whole_objective.reads_text and is_trainable_encoder(self.config)


def blueprint_of(
    spec: TrainJob,
    vocab_size: int | None,
    special_tokens: Mapping[str, int | None] | None = None,
    *,
    objective: Objective | None = None,
    sample_shape: tuple[int, ...] | None = None,
    classes: Sequence[str] | None = None,
    objectives: Sequence[Objective] | None = None,
    pooling: Literal["mean", "cls", "last"] = "mean",
) -> Blueprint:
    """Return the blueprint of a job's model.

    Args:
        spec: the job.
        vocab_size: vocabulary size of the job's tokenizer, used if the model's configuration has none; None for
            declared layers.
        special_tokens: ids such as ``eos_token_id``, added to the configuration of a model that starts from random
            weights.
        objective: task and loss with the facts about the data; None before the data is read.
        sample_shape: shape of one sample for declared layers and images; None before the data is read.
        classes: names of the classes; None without classes, and before the data is read.
        objectives: as ``objective``, for each of the job's tasks; None without ``tasks``, and before the data is read.
        pooling: see `Blueprint.pooling`.

    Raises:
        UserError: the model's configuration cannot be read or has an invalid ``vocab_size``, or its context window is
            shorter than ``training.sequence_length``; a declared embedding has another padding token than the data; or
            the configuration requests the auxiliary loss of routers.
    """
    model, training = spec.model, spec.training
    heads = _heads(spec, objectives)
    if heads:
        objective = heads[0].objective
    if model.layers is not None:
        layers = spec.single_tasks[0].model.layers if len(heads) == 1 else model.layers
        return Blueprint(
            layers=_with_padding(layers or (), objective),
            heads=heads,
            precision=training.precision,
            activation_checkpointing=training.activation_checkpointing,
            freeze=training.freeze,
            objective=objective or objective_of(spec),
            sample_shape=sample_shape or _expected_shape(spec),
            tiles=spec.data.tiles,
        )
    config = declared_config(model)
    if spec.data.images is not None:
        return _for_images(spec, config, objective, sample_shape or _expected_shape(spec), classes)
    require_no_auxiliary_loss(config)
    if model_vocab_size(model) is None:
        config["vocab_size"] = vocab_size
    length, window = training.sequence_length, config.get("max_position_embeddings")
    if isinstance(window, int) and length > window:
        raise UserError(
            f"sequence_length {length} is longer than the model's window of {window} tokens",
            hint=f"set training.sequence_length to {window} or less",
        )
    if spec.data.text_columns and is_trainable_encoder(config):
        require_single_texts(config, None if spec.data.labels is None else spec.data.labels.pair)
        require_positions(config, length, None if objective is None else objective.padding)
    if model.path is None:
        config.update(special_tokens or {})
    if objective is not None and objective.reads_text and len(heads) < 2:
        named = _with_classes(config, classes or ()) if objective.has_classes else config
        config = {**named, "pad_token_id": objective.padding}
    return Blueprint(
        config=config,
        precision=training.precision,
        activation_checkpointing=training.activation_checkpointing,
        freeze=training.freeze,
        lora=training.lora,
        objective=objective or objective_of(spec),
        heads=heads,
        pooling=pooling,
    )


def _heads(spec: TrainJob, objectives: Sequence[Objective] | None) -> tuple[TaskHead, ...]:
    """Return the heads of a job's tasks; empty without tasks. The head of a single task is part of the layers."""
    known = objectives or [objective_of(each) for each in spec.single_tasks]
    are_several = len(spec.tasks) > 1
    return tuple(
        TaskHead(
            name=task.name,
            objective=objective.model_copy(
                update={
                    "weight": task.weight,
                    "counts_samples": are_several and objective.task == "language_model",
                }
            ),
            layers=task.layers or () if are_several else (),
        )
        for task, objective in zip(spec.tasks, known, strict=bool(spec.tasks))
    )


def _for_images(
    spec: TrainJob,
    config: dict[str, Any],
    objective: Objective | None,
    shape: tuple[int, ...],
    classes: Sequence[str] | None,
) -> Blueprint:
    """Return the blueprint of a Hugging Face model that classifies images."""
    sized = with_image_size(config, shape) if spec.model.path is None else config
    return Blueprint(
        config=sized if classes is None else _with_classes(sized, classes),
        precision=spec.training.precision,
        activation_checkpointing=spec.training.activation_checkpointing,
        freeze=spec.training.freeze,
        lora=spec.training.lora,
        objective=objective or objective_of(spec),
        sample_shape=shape,
    )


def _with_classes(config: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """Return a configuration with the names of the classes, in their order."""
    names = [str(name) for name in classes]
    return {
        **{key: value for key, value in config.items() if key != "num_labels"},
        "id2label": {str(place): name for place, name in enumerate(names)},
        "label2id": {name: place for place, name in enumerate(names)},
        "problem_type": "single_label_classification",
    }


def _with_padding(layers: tuple[LayerSpec, ...], objective: Objective | None) -> tuple[LayerSpec, ...]:
    """Return the layers with the padding token of the data in the first embedding, which maps it to zeros."""
    padding = None if objective is None else objective.padding
    place = next((place for place, layer in enumerate(layers) if layer.type in EMBEDDINGS), None)
    if padding is None or place is None:
        return layers
    layer = layers[place]
    if layer.options.get("padding_idx", padding) != padding:
        raise UserError(
            f"layer {place} ({layer.type}) has padding_idx {layer.options['padding_idx']}, but texts are padded with "
            f"token {padding}",
            hint="leave padding_idx out: it is set to the padding token",
        )
    padded = layer.model_copy(update={"options": {**layer.options, "padding_idx": padding}})
    return (*layers[:place], padded, *layers[place + 1 :])


def _expected_shape(spec: TrainJob) -> tuple[int, ...]:
    """Return the shape of a sample before the data is read; for a table, that of the first linear layer's inputs."""
    if spec.data.text_columns:
        length = spec.training.sequence_length
        return (length,) if spec.data.pairs is None else (2, length)
    if spec.data.images is not None:
        return spec.data.image_shape
    if spec.data.table is None:
        return DIGIT_SHAPE
    modules = every_module(spec.model.layers or ())
    wanted = (module.options.get("in_features") for module in modules if module.type == "linear")
    first = next(wanted, None)
    return (first,) if type(first) is int and first > 0 else DIGIT_SHAPE
