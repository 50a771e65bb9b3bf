"""The field ``data.transforms`` of a training job: random changes of training samples."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from share_compute.specification.base import SpecModel

_MOST_PIXELS = 1024


class CropSpec(SpecModel):
    """Part of each image that is a sample: at a random place in training, in the middle otherwise."""

    height: int = Field(ge=1, le=_MOST_PIXELS)
    """Height of the part in pixels."""
    width: int = Field(ge=1, le=_MOST_PIXELS)
    """Width of the part in pixels."""
    padding: int = Field(default=0, ge=0, lt=_MOST_PIXELS)
    """Black pixels that are added to each side of the resized image first, fewer than height and width."""

    @model_validator(mode="after")
    def _each_crop_has_pixels_of_the_image(self) -> Self:
        if self.padding >= min(self.height, self.width):
            raise ValueError(
                f"padding {self.padding} must be less than height {self.height} and width {self.width}, "
                "so that no crop is all black"
            )
        return self


class TransformsSpec(SpecModel):
    """Random changes of the samples, in the order of these fields; other than crop, only in training."""

    crop: CropSpec | None = None
    """Part of each image that is a sample; null: the whole image."""
    flip: float = Field(default=0.0, ge=0, le=1)
    """Probability that an image is mirrored, left to right."""
    noise: float = Field(default=0.0, ge=0, le=100)
    """Standard deviation of noise that is added to the scaled values of an image."""
    mask: float = Field(default=0.0, ge=0, lt=1)
    """Probability that a token of a text is replaced by the tokenizer's mask token."""

    @property
    def changes_images(self) -> bool:
        """Whether a transform of images is given."""
        return self.crop is not None or self.flip > 0 or self.noise > 0
