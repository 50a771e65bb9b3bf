"""Data sets of equal-sized samples in three splits: text as chunks of one token file, digits as rows of pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from share_compute.data.order import keyed_permutation

Split: TypeAlias = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

Array: TypeAlias = NDArray[Any]

_DIGITS_KEY = 0x64696769
"""Part of the key of the digits' permutation, to distinguish it from the permutations of `StepOrder`."""


class Samples(Protocol):
    """A data set of equal-sized samples, divided into splits."""

    def size(self, split: Split) -> int:
        """Return the number of samples in a split."""

    def take(self, split: Split, indices: Sequence[int] | NDArray[np.int64]) -> tuple[Array, Array]:
        """Return inputs and targets of the samples at ``indices`` of a split, in the order of ``indices``.

        Text: inputs and targets int64 ``[n, seq]``, the targets being the inputs shifted by one token.
        Texts with labels: inputs int64 ``[n, seq]``, targets int64 ``[n, 2]``: class and place of the last token.
        Pairs of texts: inputs int64 ``[n, 2, seq]``, targets int64 ``[n, 2]``: places of the last tokens.
        Digits: inputs float32 ``[n, 64]`` in 0..1, targets int64 ``[n]``.
        Images: inputs float32 ``[n, channels, height, width]``, targets int64 ``[n]``.
        Tables: inputs float32 ``[n, inputs]``, targets int64 (classes) or float32 (numbers) ``[n]``.

        Raises:
            IndexError: an index is not in ``range(size(split))``.
        """


@dataclass(frozen=True, slots=True)
class SplitSizes:
    """Number of samples in each split."""

    train: int
    validation: int
    test: int

    @classmethod
    def of(cls, total: int, validation_fraction: float, test_fraction: float) -> SplitSizes:
        """Divide ``total`` samples. Validation and test sizes are rounded down, and training gets the rest."""
        validation, test = int(total * validation_fraction), int(total * test_fraction)
        return cls(total - validation - test, validation, test)

    def range_of(self, split: Split) -> range:
        """Return a split's indices among all samples, which are in the order train, validation, test."""
        starts = {"train": 0, "validation": self.train, "test": self.train + self.validation}
        return range(starts[split], starts[split] + getattr(self, split))

    def locate(self, split: Split, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert indices in a split to indices among all samples.

        Raises:
            IndexError: an index is not in the split.
        """
        region = self.range_of(split)
        chosen = np.asarray(indices, dtype=np.int64)
        if chosen.size and not (chosen.min() >= 0 and chosen.max() < len(region)):
            raise IndexError(
                f"the {split} split has {len(region)} samples; asked for {chosen.min()}..{chosen.max()}"
            )
        return chosen + region.start


@dataclass(frozen=True, slots=True)
class TextSamples:
    """Chunks of ``sequence_length + 1`` tokens of one long array of tokens.

    Adjacent chunks share one token: the last target of a chunk is the first input of the next chunk. The splits are in
    the order train, validation, test. They are contiguous, unless validation or test has its own files.
    """

    tokens: NDArray[Any]
    """All tokens, shape ``[tokens]``, of an unsigned integer dtype; may be a memory map."""
    sequence_length: int
    sizes: SplitSizes
    firsts: Mapping[Split, int] = field(default_factory=dict)
    """Index of the first token of each split whose samples do not continue those of the split before it."""

    @staticmethod
    def count(num_tokens: int, sequence_length: int) -> int:
        """Return the number of whole samples in ``num_tokens`` tokens. Remaining tokens are not used."""
        return max(0, (num_tokens - 1) // sequence_length)

    def size(self, split: Split) -> int:
        """Return the number of samples in a split."""
        return len(self.sizes.range_of(split))

    def take(self, split: Split, indices: Sequence[int] | NDArray[np.int64]) -> tuple[Array, Array]:
        """Return inputs and targets, both int64 ``[n, seq]``; see `Samples.take`."""
        places = self.sizes.locate(split, indices)
        before = self.sizes.range_of(split).start
        first = self.firsts.get(split, before * self.sequence_length)
        starts = first + (places - before) * self.sequence_length
        chunks = self.tokens[starts[:, None] + np.arange(self.sequence_length + 1)].astype(np.int64)
        return np.ascontiguousarray(chunks[:, :-1]), np.ascontiguousarray(chunks[:, 1:])


@dataclass(frozen=True, slots=True)
class DigitSamples:
    """Scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, in an order drawn from a seed."""

    sizes: SplitSizes
    pixels: NDArray[np.float32] = field(repr=False)
    """Pixel values scaled to 0..1, shape ``[1797, 64]``."""
    labels: NDArray[np.int64] = field(repr=False)
    """Digits 0 to 9, shape ``[1797]``."""

    @classmethod
    def load(cls, seed: int, validation_fraction: float, test_fraction: float) -> DigitSamples:
        """Load the digits and split them by a permutation that depends only on ``seed``."""
        from sklearn.datasets import load_digits  # noqa: PLC0415 - a second of import that text jobs never need

        pixels, labels = load_digits(return_X_y=True)
        order = keyed_permutation(len(labels), _DIGITS_KEY, seed)
        return cls(
            SplitSizes.of(len(labels), validation_fraction, test_fraction),
            (pixels[order] / 16.0).astype(np.float32),
            labels[order].astype(np.int64),
        )

    def size(self, split: Split) -> int:
        """Return the number of samples in a split."""
        return len(self.sizes.range_of(split))

    def take(self, split: Split, indices: Sequence[int] | NDArray[np.int64]) -> tuple[Array, Array]:
        """Return inputs float32 ``[n, 64]`` and targets int64 ``[n]``; see `Samples.take`."""
        rows = self.sizes.locate(split, indices)
        return self.pixels[rows], self.labels[rows]
