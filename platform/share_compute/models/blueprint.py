"""How to build any stage of one model, without its weights. Small enough to travel in a message."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from share_compute.errors import UserError
from share_compute.planning.partitioning import Shard
from share_compute.specification import LayerSpec
from share_compute.strict import StrictModel


class Blueprint(StrictModel):
    """The declared model: a Hugging Face configuration, or a list of torch layers."""

    config: dict[str, Any] | None = None
    """Hugging Face configuration, with ``model_type``."""
    layers: tuple[LayerSpec, ...] = ()

    @property
    def task(self) -> Literal["language", "classification"]:
        """What its outputs mean: next tokens, or one class per sample."""
        return "language" if self.config is not None else "classification"


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Parameters of a model, counted where they live. Tied weights count once, with the embedding."""

    layers: tuple[int, ...]
    """Parameters of each layer."""
    embedding: int
    """Parameters before the first layer."""
    head: int
    """Parameters after the last layer, without a tied head."""
    tied: int = 0
    """Parameters of a head that is the embedding again: the last shard holds a second copy of these."""
    tied_name: str | None = None
    """Stored name of that parameter."""
    hidden_size: int = 0
    intermediate_size: int = 0
    vocab_size: int = 0

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(self.layers) + self.embedding + self.head

    def of(self, shard: Shard) -> int:
        """Return the parameters that a member holding ``shard`` has in memory."""
        held = sum(self.layers[shard.start : shard.stop])
        if shard.is_first:
            held += self.embedding
        if shard.is_last:
            held += self.head + (0 if shard.is_first else self.tied)
        return held


class Stage(ABC):
    """One shard of a model, ready to compute.

    The first stage takes samples (token ids ``[batch, seq]`` or features ``[batch, features]``), later ones the
    hidden states ``[batch, seq, hidden]`` of the stage before; the last returns logits.
    """

    shard: Shard
    module: nn.Module
    """Parameters carry the same names as in the whole model."""
    tied: Mapping[str, str]
    """Parameters that are another stage's: ``{"lm_head.weight": "model.embed_tokens.weight"}``."""

    @abstractmethod
    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the shard on one microbatch."""

    @abstractmethod
    def initialize(self, seed: int) -> None:
        """Give every tensor its starting value; depends on the seed and the tensor's name only."""

    def prepare_cell(self, *key: int) -> None:
        """Seed the randomness of the next forward (dropout), from (seed, step, microbatch); default: there is none."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by the name under which they are stored (a tied one under its source's name)."""
        return {self.tied.get(name, name): parameter for name, parameter in self.module.named_parameters()}

    def persistent(self) -> dict[str, Tensor]:
        """Return all tensors that belong in a checkpoint: parameters and persistent buffers, by stored name."""
        return {self.tied.get(name, name): tensor for name, tensor in self.module.state_dict().items()}


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy summed over all targets.

    Args:
        logits: ``[..., classes]``.
        targets: class or token ids, ``[...]``; best on the CPU, where looking at them makes no GPU wait.

    Raises:
        UserError: a target is not among the classes.
    """
    classes = logits.shape[-1]
    if targets.numel() and int(targets.max()) >= classes:
        raise UserError(
            f"the model's last layer has {classes} outputs, but the data has class {int(targets.max())}",
            mend=f"give the last layer at least {int(targets.max()) + 1} outputs",
        )
    return nn.functional.cross_entropy(
        logits.reshape(-1, classes).float(), targets.reshape(-1).to(logits.device), reduction="sum"
    )


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on all parts and nothing else."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def build_stage(blueprint: Blueprint, shard: Shard, device: torch.device) -> Stage:
    """Build one stage on ``device``; its parameters hold no meaningful values until `Stage.initialize` or a load.

    Raises:
        UserError: the architecture declares no pipeline plan, or an option of a layer is wrong.
    """
    if blueprint.config is not None:
        from share_compute.models.huggingface import HuggingFaceStage  # noqa: PLC0415 - transformers is slow to import

        return HuggingFaceStage(blueprint.config, shard, device)
    from share_compute.models.layers import LayeredStage  # noqa: PLC0415

    return LayeredStage(blueprint.layers, shard, device)


def dissect(blueprint: Blueprint) -> Anatomy:
    """Count the parameters of a model on the meta device: nothing is allocated."""
    if blueprint.config is not None:
        from share_compute.models.huggingface import dissect_config  # noqa: PLC0415

        return dissect_config(blueprint.config)
    from share_compute.models.layers import dissect_layers  # noqa: PLC0415

    return dissect_layers(blueprint.layers)
