"""Changes samples at random: crop, flip and noise of images, and masked tokens of text.

The change of a sample depends only on the seed, the step and the sample. So it is the same on every plan and after a
failure, bit for bit. All random numbers are raw integers of Philox, whose values NumPy never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from share_compute.data.samples import Array, Split
from share_compute.data.tokenization import load_tokenizer
from share_compute.errors import UserError
from share_compute.specification import CropSpec, TrainJob, TransformsSpec

_KEY = 0x7472616E
"""Part of the key of all random numbers, to distinguish them from those of the order of the samples."""
_NUMBERS_OF_16_BITS = 12
"""Numbers that are added up for one number of noise: the variance of their sum is 1 (Irwin-Hall distribution)."""
_WORDS_OF_A_NUMBER = _NUMBERS_OF_16_BITS // 4


@dataclass(frozen=True, slots=True)
class Transforms:
    """Random changes of the samples of one job.

    Args:
        spec: the changes.
        seed: seed of the job.
        mask: id of the mask token; None if no tokens are masked.
        kept: ids of special tokens, which are never masked.
        black: value of a black pixel for each channel, ``[channels, 1, 1]``.
    """

    spec: TransformsSpec
    seed: int
    mask: int | None = None
    kept: tuple[int, ...] = ()
    black: NDArray[np.float32] = field(default_factory=lambda: np.zeros((1, 1, 1), np.float32))

    def apply(
        self, inputs: Array, split: Split, step: int, indices: Sequence[int] | NDArray[np.int64]
    ) -> Array:
        """Return the inputs of some samples, changed.

        Args:
            inputs: inputs as the data has them, ``[n, ...]``.
            split: split of the samples; splits other than training only get the crop in the middle.
            step: number of the step; unused for other splits.
            indices: places of the samples in the split, ``[n]``.
        """
        trains = split == "train"
        if self.mask is not None:
            return self._masked(inputs, self.mask, step, indices) if trains else inputs
        if not trains:
            return inputs if self.spec.crop is None else self._middle(inputs, self.spec.crop)
        return np.stack(
            [self._changed(image, step, int(index)) for image, index in zip(inputs, indices, strict=True)]
        )

    def _changed(self, image: Array, step: int, index: int) -> Array:
        bits = self._bits(step, index)
        row, column, flip = (int(word) for word in bits.random_raw(3))
        crop = self.spec.crop
        if crop is not None:
            rows, columns = (side + 2 * crop.padding for side in image.shape[1:])
            top, left = row % (rows - crop.height + 1), column % (columns - crop.width + 1)
            image = self._part(image, crop, top - crop.padding, left - crop.padding)
        if (flip >> 11) * 2.0**-53 < self.spec.flip:
            image = image[:, :, ::-1]
        if self.spec.noise:
            image = image + np.float32(self.spec.noise) * _noise(bits, image.size).reshape(image.shape)
        return np.ascontiguousarray(image)

    def _middle(self, images: Array, crop: CropSpec) -> Array:
        """Return the middle part of images ``[n, channels, height, width]``."""
        # The two backends of transformers differ by a pixel if an odd number of rows or columns is added. This code
        # matches its backend without torchvision.
        top, left = (images.shape[-2] - crop.height) // 2, (images.shape[-1] - crop.width) // 2
        return self._part(images, crop, top, left)

    def _part(self, images: Array, crop: CropSpec, top: int, left: int) -> Array:
        """Return a part of images, ``[..., channels, height, width]``; pixels outside of the images are black.

        Args:
            images: one image or several.
            crop: size of the part.
            top: first row of the part; negative if it is above the image.
            left: first column of the part; negative if it is left of the image.
        """
        part = np.empty((*images.shape[:-2], crop.height, crop.width), images.dtype)
        part[...] = self.black
        height, width = images.shape[-2:]
        rows = slice(max(top, 0), min(top + crop.height, height))
        columns = slice(max(left, 0), min(left + crop.width, width))
        inside = images[..., rows, columns]
        below, right = rows.start - top, columns.start - left
        part[..., below : below + inside.shape[-2], right : right + inside.shape[-1]] = inside
        return part

    def _masked(self, ids: Array, mask: int, step: int, indices: Sequence[int] | NDArray[np.int64]) -> Array:
        drawn = np.stack([self._bits(step, int(index)).random_raw(ids[0].size) for index in indices])
        drawn = drawn.reshape(ids.shape)
        chosen = (drawn >> np.uint64(11)) * 2.0**-53 < self.spec.mask
        return np.where(chosen & ~np.isin(ids, self.kept), mask, ids)

    def _bits(self, step: int, index: int) -> Any:
        return np.random.Philox(np.random.SeedSequence((_KEY, self.seed, step, index)))


def transforms_of(spec: TrainJob, tokenizer: Path | None) -> Transforms | None:
    """Return the transforms of a job; None if it has none.

    Args:
        spec: the job.
        tokenizer: folder of the tokenizer; None if the data is not text.

    Raises:
        UserError: the job masks tokens, and its tokenizer has no mask token.
    """
    wanted = spec.data.transforms
    if wanted is None or not (wanted.mask or wanted.changes_images):
        return None
    if spec.data.images is not None:
        mean, deviation = (
            np.asarray(values, dtype=np.float32).reshape(-1, 1, 1)
            for values in (spec.data.images.mean, spec.data.images.deviation)
        )
        return Transforms(wanted, spec.training.seed, black=(0 - mean) / deviation)
    if not wanted.mask or tokenizer is None:
        return Transforms(wanted, spec.training.seed)
    loaded = load_tokenizer(tokenizer)
    if loaded.mask_token_id is None:
        raise UserError(
            f"data.transforms.mask: the tokenizer ({spec.tokenizer.path or 'trained for this job'}) has no mask token",
            hint="name a tokenizer with a mask token in tokenizer.path, or leave data.transforms.mask out",
        )
    return Transforms(wanted, spec.training.seed, loaded.mask_token_id, tuple(sorted(loaded.all_special_ids)))


def _noise(bits: Any, count: int) -> NDArray[np.float32]:
    """Return nearly normal numbers, ``[count]``: sums of whole numbers, so that every machine has the same bits."""
    words: NDArray[np.uint64] = bits.random_raw(count * _WORDS_OF_A_NUMBER)
    sums = words.view(np.uint16).reshape(count, _NUMBERS_OF_16_BITS).sum(axis=1, dtype=np.int64)
    # The subtraction of the mean is exact, and so is the division by a power of two.
    centred = 2 * sums - _NUMBERS_OF_16_BITS * 0xFFFF
    return np.asarray(centred / 2.0**17, dtype=np.float32)
