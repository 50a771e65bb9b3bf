"""Builds stages and cost profiles from blueprints of Hugging Face models and of declared layers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from share_compute.models.blueprint import Blueprint
from share_compute.models.profiles.cache import cached_profile
from share_compute.models.profiles.profile import ModelProfile
from share_compute.shards import Shard

if TYPE_CHECKING:
    import torch

    from share_compute.models.stage import Stage


def build_stage(blueprint: Blueprint, shard: Shard, device: torch.device) -> Stage:
    """Build one stage on ``device``; the caller must then call `Stage.initialize` or load weights.

    Raises:
        UserError: the model is invalid or cannot be split, a frozen or adapted parameter does not exist, all parameters
            are frozen, or the device cannot compute in the precision.
    """
    if blueprint.classifies_images:
        from share_compute.models.huggingface.image_classifier import ImageStage  # noqa: PLC0415 - slow to import

        return ImageStage(blueprint, shard, device)
    if blueprint.uses_encoder:
        from share_compute.models.huggingface.text_encoder import TextEncoderStage  # noqa: PLC0415 - slow to import

        return TextEncoderStage(blueprint, shard, device)
    if blueprint.config is not None:
        from share_compute.models.huggingface.decoder import HuggingFaceStage  # noqa: PLC0415 - transformers is slow to import

        return HuggingFaceStage(blueprint, shard, device)
    from share_compute.models.layers import LayeredStage  # noqa: PLC0415

    return LayeredStage(blueprint, shard, device)


def dissect(blueprint: Blueprint) -> ModelProfile:
    """Return the cost profile of a model, without allocating memory for its large weights.

    Profiles are kept on disk; see `cached_profile`.

    Raises:
        UserError: the model is invalid or cannot be split, a frozen or adapted parameter does not exist, or all
            parameters are frozen.
    """
    return cached_profile(blueprint.model_dump(mode="json"), partial(_dissect, blueprint))


def _dissect(blueprint: Blueprint) -> ModelProfile:
    if blueprint.classifies_images:
        from share_compute.models.huggingface.image_classifier import profile_images  # noqa: PLC0415

        return profile_images(blueprint)
    if blueprint.uses_encoder:
        from share_compute.models.huggingface.text_encoder import profile_text_encoder  # noqa: PLC0415

        return profile_text_encoder(blueprint)
    if blueprint.config is not None:
        from share_compute.models.huggingface.decoder_profile import profile_config  # noqa: PLC0415

        return profile_config(blueprint)
    from share_compute.models.layers import profile_layers  # noqa: PLC0415

    return profile_layers(blueprint)
