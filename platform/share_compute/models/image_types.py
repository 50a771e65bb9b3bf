"""Hugging Face models that classify images, and can be cut between their layers.

In transformers, these models declare no pipeline plan. So this module lists the architectures whose base models have
the modules ``embeddings``, ``layers`` and ``layernorm``, in this order, which exchange only hidden states.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from share_compute.errors import UserError
from share_compute.specification import ImagesSpec
from share_compute.specification.transforms import CropSpec

IMAGE_MODELS = ("ijepa", "vit", "vit_msn")
"""Architectures by ``model_type``."""
_SIDES = 2
_BILINEAR = 2
"""Number of bilinear interpolation in Pillow."""


def require_image_model(config: Mapping[str, Any]) -> None:
    """Raise UserError if a configuration describes no image model that can be trained."""
    if config.get("model_type") not in IMAGE_MODELS:
        raise UserError(
            f"architecture {config.get('model_type')!r} is no classifier of images that can be cut into stages",
            hint=f"choose one of {', '.join(IMAGE_MODELS)}, or declare the layers in model.layers",
        )


def with_image_size(config: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """Return a configuration with the size and channels of the samples, unless the configuration sets others.

    Args:
        config: configuration of a model that starts from random weights.
        shape: shape of a sample, ``[channels, height, width]``.
    """
    channels, height, width = shape
    size = height if height == width else [height, width]
    return {"image_size": size, "num_channels": channels, **config}


def require_images(config: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    """Check that the samples of a job have the size that a model takes.

    Args:
        config: configuration of the model, with all defaults of its architecture.
        shape: shape of a sample, ``[channels, height, width]``.

    Raises:
        UserError: a sample has other channels or another size, or the patches do not fill an image.
    """
    channels, *given = shape
    wanted, patch = _sides(config, "image_size"), _sides(config, "patch_size")
    if given != wanted:
        raise UserError(
            f"data.images: samples have {given[0]} x {given[1]} pixels, and the model takes {wanted[0]} x {wanted[1]}",
            hint=f"set height to {wanted[0]} and width to {wanted[1]} in data.images, or in data.transforms.crop",
        )
    if channels != config["num_channels"]:
        raise UserError(
            f"data.images: samples have {channels} channels, and the model takes {config['num_channels']}",
            hint=f"set data.images.channels to {config['num_channels']}",
        )
    if any(edge < 1 or side % edge for side, edge in zip(wanted, patch, strict=True)):
        raise UserError(
            f"the model's patches of {patch[0]} x {patch[1]} do not fill its images of {wanted[0]} x {wanted[1]}",
            hint="set patch_size in model.config to a divisor of both sides",
        )


def image_processor(images: ImagesSpec, crop: CropSpec | None) -> dict[str, Any]:
    """Return the content of ``preprocessor_config.json``, with which transformers prepares images for the model.

    Args:
        images: size and scale of the images.
        crop: part of an image that is a sample; None for the whole image.
    """
    cropping: dict[str, Any] = {"do_center_crop": crop is not None}
    if crop is not None:
        cropping["crop_size"] = {"height": crop.height, "width": crop.width}
    return {
        **cropping,
        "do_convert_rgb": images.channels == 3,
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": images.height, "width": images.width},
        "resample": _BILINEAR,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": _by_channel(images.mean, images.channels),
        "image_std": _by_channel(images.deviation, images.channels),
    }


def _by_channel(values: Sequence[float], channels: int) -> list[float]:
    return [*values] if len(values) == channels else [*values] * channels


def _sides(config: Mapping[str, Any], name: str) -> list[int]:
    """Return height and width from a configuration's size, which is one number for both or a pair."""
    size = config[name]
    sides = [size] * _SIDES if isinstance(size, int) else list(size)
    if len(sides) != _SIDES:
        raise UserError(
            f"{name} of the model has {len(sides)} numbers",
            hint=f"set {name} in model.config to one number, or to height and width",
        )
    return sides
