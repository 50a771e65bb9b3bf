"""Blueprints: descriptions to build any stage of one model, without its weights; small enough to send in a message."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from share_compute.errors import UserError
from share_compute.models.configuration import declared_config, model_vocab_size
from share_compute.models.precision import computing_in, require_precision
from share_compute.planning.partitioning import Shard
from share_compute.planning.profile import ModelProfile
from share_compute.specification import LayerSpec, LoraSpec, Precision, TrainJob
from share_compute.strict import StrictModel


class Blueprint(StrictModel):
    """The declared model (a Hugging Face configuration or a list of torch layers), and its training options."""

    config: dict[str, Any] | None = None
    """Hugging Face configuration, with ``model_type``."""
    layers: tuple[LayerSpec, ...] = ()
    precision: Precision = "float32"
    """Type in which layers compute."""
    activation_checkpointing: bool = False
    """Whether only the inputs of a layer are kept for its backward pass."""
    freeze: tuple[str, ...] = ()
    """Patterns of stored names, and ranges of layers, that are not trained."""
    lora: LoraSpec | None = None
    """Adapters that are trained instead of the model's own weights."""

    @property
    def task(self) -> Literal["language", "classification"]:
        """Meaning of its outputs: next tokens (language), or one class per sample (classification)."""
        return "language" if self.config is not None else "classification"


def blueprint_of(
    spec: TrainJob, vocab_size: int | None, special_tokens: Mapping[str, int | None] | None = None
) -> Blueprint:
    """Return the model of a job as it will be built.

    Args:
        spec: the job.
        vocab_size: vocabulary size of its tokenizer; used if the model's configuration has none.
        special_tokens: ids such as ``eos_token_id`` for a model that starts without weights.

    Raises:
        UserError: the model's configuration cannot be read, or its window is shorter than the job's samples.
    """
    model, training = spec.model, spec.training
    if model.layers is not None:
        return Blueprint(
            layers=model.layers,
            precision=training.precision,
            activation_checkpointing=training.activation_checkpointing,
            freeze=training.freeze,
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
    )


class Stage(ABC):
    """One shard of a model, ready to compute.

    The first stage takes samples (token ids ``[batch, seq]`` or features ``[batch, features]``), later ones the
    hidden states ``[batch, seq, hidden]`` of the stage before; the last returns logits.

    Args:
        blueprint: blueprint of the whole model.
        shard: part of the model that this stage holds.
        device: device of the shard.

    Raises:
        UserError: the device cannot compute in the blueprint's precision.
    """

    module: nn.Module
    """The torch module. Its parameters have nearly the names of the whole model; `stored_name` maps them."""
    tied: Mapping[str, str]
    """Tied parameters, with the names of their sources: ``{"lm_head.weight": "model.embed_tokens.weight"}``."""
    trains_before: bool
    """Whether an earlier stage trains parameters, and so needs the gradient of this stage's inputs."""

    def __init__(self, blueprint: Blueprint, shard: Shard, device: torch.device) -> None:
        require_precision(blueprint.precision, device)
        self.shard = shard
        self._device = device
        self._precision = blueprint.precision
        self._cell: tuple[int, ...] = ()

    @property
    @abstractmethod
    def layers(self) -> Mapping[int, nn.Module]:
        """The shard's layers, by their index in the whole model."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the shard on one microbatch, in the blueprint's precision."""
        with computing_in(self._precision, self._device):
            return self.compute(inputs)

    @abstractmethod
    def compute(self, inputs: Tensor) -> Tensor:
        """Compute the shard on one microbatch, in the precision of the surrounding context."""

    @abstractmethod
    def initialize(self, seed: int) -> None:
        """Initialize every tensor; values depend only on the seed and the tensor's name."""

    def initialize_added(self, seed: int) -> None:
        """Initialize the tensors that no folder of the model's weights has (`added`); by default there are none."""

    @property
    def added(self) -> frozenset[str]:
        """Stored names of the tensors that `initialize_added` initializes."""
        return frozenset()

    def prepare_cell(self, *key: int) -> None:
        """Seed the randomness (dropout) of each layer in the next forward by ``key`` and the layer's index.

        Args:
            key: (seed, step, microbatch).
        """
        self._cell = key

    def stored_name(self, name: str) -> str:
        """Return the name under which a tensor of `module` is stored; for a tied one the name of its source."""
        return self.tied.get(name, name)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by stored name."""
        return {self.stored_name(name): parameter for name, parameter in self.module.named_parameters()}

    def persistent(self) -> dict[str, Tensor]:
        """Return all tensors of a checkpoint, parameters and persistent buffers, by stored name."""
        return {self.stored_name(name): tensor for name, tensor in self.module.state_dict().items()}


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy summed over all targets.

    Args:
        logits: model outputs ``[..., classes]``.
        targets: class or token ids, ``[...]``; best on the CPU, where reading them does not synchronize a GPU.

    Raises:
        UserError: a target is not among the classes.
    """
    classes = logits.shape[-1]
    if targets.numel() and int(targets.max()) >= classes:
        raise UserError(
            f"the model's last layer has {classes} outputs, but the data has class {int(targets.max())}",
            hint=f"give the last layer at least {int(targets.max()) + 1} outputs",
        )
    return summed_cross_entropy(logits, targets)


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy summed over all targets, without checking the targets."""
    return nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1).to(logits.device), reduction="sum"
    )


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends only on the parts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def build_stage(blueprint: Blueprint, shard: Shard, device: torch.device) -> Stage:
    """Build one stage on ``device``; its parameters hold no meaningful values until `Stage.initialize` or a load.

    Raises:
        UserError: the architecture declares no pipeline plan, a layer has a wrong option, or the device cannot
            compute in the precision.
    """
    if blueprint.config is not None:
        from share_compute.models.huggingface import HuggingFaceStage  # noqa: PLC0415 - transformers is slow to import

        return HuggingFaceStage(blueprint, shard, device)
    from share_compute.models.layers import LayeredStage  # noqa: PLC0415

    return LayeredStage(blueprint, shard, device)


def dissect(blueprint: Blueprint) -> ModelProfile:
    """Return the cost profile of a model, from its own code, without memory for its weights and without computing.

    Raises:
        UserError: the architecture declares no pipeline plan, the model's options are wrong, or a frozen or adapted
            parameter does not exist.
    """
    if blueprint.config is not None:
        from share_compute.models.huggingface_profile import profile_config  # noqa: PLC0415

        return profile_config(blueprint)
    from share_compute.models.layers import profile_layers  # noqa: PLC0415

    return profile_layers(blueprint)
