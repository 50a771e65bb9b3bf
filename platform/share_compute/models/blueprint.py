"""How to build any stage of one model, without its weights. Small enough to travel in a message."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from share_compute.errors import UserError
from share_compute.planning.partitioning import Shard
from share_compute.planning.profile import ModelProfile
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

    @property
    @abstractmethod
    def layers(self) -> Mapping[int, nn.Module]:
        """The shard's layers, by their place in the whole model."""

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
    return summed_cross_entropy(logits, targets)


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return what `loss_sum` does, without a look at the targets."""
    return nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1).to(logits.device), reduction="sum"
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


def dissect(blueprint: Blueprint) -> ModelProfile:
    """Count what a model costs, from its own code: no memory is taken for its weights, and nothing is computed.

    Raises:
        UserError: the architecture declares no pipeline plan, or the model's options are wrong.
    """
    if blueprint.config is not None:
        from share_compute.models.huggingface_profile import profile_config  # noqa: PLC0415

        return profile_config(blueprint.config)
    from share_compute.models.layers import profile_layers  # noqa: PLC0415

    return profile_layers(blueprint.layers)
