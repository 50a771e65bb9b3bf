"""The fields ``data`` and ``tokenizer`` of a training job."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, StrictInt, model_validator

from share_compute.specification.base import SpecModel, TextPath, exactly_one
from share_compute.specification.transforms import TransformsSpec

TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet")
TABLE_SUFFIXES = (".csv", ".parquet")
LABELLED_SUFFIXES = (".csv", ".jsonl", ".parquet")
MANIFEST_SUFFIXES = (".csv", ".jsonl")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")


class ImagesSpec(SpecModel):
    """Size and scale to which images are converted."""

    height: int = Field(ge=1, le=1024)
    """Height in pixels to which images are resized."""
    width: int = Field(ge=1, le=1024)
    """Width in pixels to which images are resized."""
    channels: Literal[1, 3] = 3
    """Number of channels: 1 for grey, 3 for red, green and blue."""
    mean: tuple[float, ...] = (0.5,)
    """Value in 0 to 1 that becomes 0: one for each channel, or one for all."""
    deviation: tuple[Annotated[float, Field(gt=0)], ...] = (0.5,)
    """Difference of values in 0 to 1 that becomes 1: one for each channel, or one for all."""

    @model_validator(mode="after")
    def _each_channel_is_normalised(self) -> Self:
        for name in ("mean", "deviation"):
            if len(getattr(self, name)) not in (1, self.channels):
                raise ValueError(f"{name} needs one value, or one for each of the {self.channels} channels")
        return self


class TableSpec(SpecModel):
    """Meaning of the columns of tables: numbers and categories, from which a target is predicted."""

    target: str = Field(min_length=1)
    """Column to predict: a class for tabular_classification, a number for tabular_regression."""
    features: Annotated[tuple[str, ...], Field(fail_fast=True)] | None = Field(default=None, min_length=1)
    """Columns from which the target is predicted, in this order; default: all other columns of the first file."""
    categorical: tuple[str, ...] = Field(default=(), fail_fast=True)
    """Features that are categories; each category becomes an input that is 0 or 1. All other features are numbers."""
    missing: Literal["refuse", "fill", "drop"] = "refuse"
    """Features without a value: refuse the data, fill in the mean of the training split, or drop the row."""
    scale: Literal["standard", "none"] = "standard"
    """Scale of numbers, the target of a regression included: mean 0 and deviation 1 in the training split, or none."""

    @model_validator(mode="after")
    def _columns_are_distinct(self) -> Self:
        features = self.features
        for name, columns in (("features", features or ()), ("categorical", self.categorical)):
            twice = sorted(column for column, count in Counter(columns).items() if count > 1)
            if twice:
                raise ValueError(f"{name} names {twice[0]!r} twice")
            if self.target in columns:
                raise ValueError(f"{name} contains the target {self.target!r}")
        unknown = set(self.categorical).difference(self.categorical if features is None else features)
        if unknown:
            raise ValueError(f"categorical names {min(unknown)!r}, which is not among the features")
        return self


class LabelsSpec(SpecModel):
    """Columns of files whose rows are texts with labels; ``data.text_column`` is the column of the text."""

    column: str = Field(default="label", min_length=1)
    """Column with the class of each text."""
    pair: str | None = Field(default=None, min_length=1)
    """Column with a second text of each row, for classes of pairs of texts."""


class PairsSpec(SpecModel):
    """Columns of files whose rows are two texts that belong together; the first is in ``data.text_column``."""

    column: str = Field(default="positive", min_length=1)
    """Column with the text that belongs to the first one."""


Slices: TypeAlias = tuple[
    StrictInt, StrictInt, Annotated[StrictInt, Field(ge=1, le=16)], Annotated[StrictInt, Field(ge=1, le=16)]
]
"""Number of parts into which samples, channels, heights and widths are cut."""
Slicing: TypeAlias = Literal["data_parallel", "full_batch"] | Slices
"""How the batch of a step is divided."""


class DataSpec(SpecModel):
    """Training data: ``files`` with text, tables or images, or a ``dataset`` that ships with a package."""

    model_config = exactly_one("files", "dataset")

    files: Annotated[tuple[TextPath, ...], Field(fail_fast=True)] | None = None
    """Files on the server, or of an upload: .txt, .jsonl, .parquet; folders of images; tables and labels also .csv."""
    dataset: Literal["digits"] | None = Field(default=None, title="Data set")
    """A data set that ships with scikit-learn: 1,797 handwritten digits of 8 x 8 pixels."""
    table: TableSpec | None = Field(default=None, title="Columns of tables")
    """Read the files as tables, with these columns; null: as text."""
    images: ImagesSpec | None = Field(default=None, title="Images")
    """Read the files as folders of images, with one folder for each class, or as manifests of images; null: as text."""
    labels: LabelsSpec | None = Field(default=None, title="Texts with labels")
    """Read each row of the files as a text with a label, for text_classification; null: as plain text."""
    validation_files: Annotated[tuple[TextPath, ...], Field(fail_fast=True)] | None = None
    """Files, or folders of images, for validation, instead of ``validation_fraction``."""
    test_files: Annotated[tuple[TextPath, ...], Field(fail_fast=True)] | None = None
    """Files, or folders of images, for the final test, instead of ``test_fraction``."""
    pairs: PairsSpec | None = Field(default=None, title="Pairs of texts")
    """Read each row of the files as two texts that belong together, for embedding; null: as plain text."""
    transforms: TransformsSpec | None = Field(default=None, title="Random changes")
    """Random changes of training samples, drawn from the seed, the step and the sample; null: none."""
    slicing: Slicing = "data_parallel"
    """Division of a batch: data_parallel, full_batch (machines read all samples), or [1, 1, 2, 2] for image tiles."""
    text_column: str = "text"
    """Column that holds the text, in files with columns."""
    validation_fraction: float = Field(default=0.05, ge=0, lt=0.5)
    """Share of the samples kept for validation."""
    test_fraction: float = Field(default=0.05, ge=0, lt=0.5)
    """Share of the samples kept for the final test."""
    shuffle: bool = True
    """Whether each pass visits the samples in a new order, drawn from the seed."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.files is None) == (self.dataset is None):
            raise ValueError("give exactly one of files and dataset")
        readings = [
            name for name in ("table", "images", "labels", "pairs") if getattr(self, name) is not None
        ]
        if len(readings) > 1:
            raise ValueError(f"files are read in one way: give only one of {' and '.join(readings)}")
        if self.files is None:
            if readings:
                raise ValueError(f"{readings[0]} says how data.files are read: give files instead of dataset")
            for name in ("validation_files", "test_files"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} needs data.files: the samples of a dataset are split by fractions"
                    )
        columns = list(self.text_columns.values())
        for place, column in enumerate(columns):
            if column in columns[:place]:
                raise ValueError(f"column {column!r} is named twice among {', '.join(self.text_columns)}")
        self._files_are_known()
        self._transforms_fit()
        self._slicing_fits()
        return self

    def _slicing_fits(self) -> None:
        tiles = self.tiles
        if tiles is None:
            return
        if self.images is None:
            raise ValueError(
                f"slicing {list(self.slicing)} cuts images: give data.images, or slicing: data_parallel"
            )
        if self.slicing[:2] != (1, 1):
            raise ValueError(
                f"slicing {list(self.slicing)} must begin with 1, 1: microbatches divide the samples of a batch, and "
                "channels are not divided"
            )
        if tiles == (1, 1):
            raise ValueError("slicing [1, 1, 1, 1] cuts nothing: give slicing: data_parallel")
        for side, count, pixels in zip(("height", "width"), tiles, self.image_shape[1:], strict=True):
            if pixels % count:
                raise ValueError(
                    f"slicing cuts the {side} of {pixels} pixels into {count} parts, which does not divide it"
                )

    def _transforms_fit(self) -> None:
        wanted, images = self.transforms, self.images
        if wanted is None:
            return
        if wanted.changes_images and images is None:
            raise ValueError("transforms.crop, flip and noise change images: give data.images")
        if wanted.mask and not self.is_text:
            raise ValueError("transforms.mask replaces tokens of text, and the data is not text")
        crop = wanted.crop
        for side in ("height", "width") if crop is not None and images is not None else ():
            most = getattr(images, side) + 2 * crop.padding  # type: ignore[union-attr]
            if getattr(crop, side) > most:
                raise ValueError(
                    f"transforms.crop.{side} {getattr(crop, side)} is larger than the image with padding: {most} pixels"
                )

    def _files_are_known(self) -> None:
        for name in ("files", "validation_files", "test_files"):
            if getattr(self, name) == ():
                raise ValueError(f"{name} is empty")
        if self.dataset is None:
            self._require_distinct_files()
        if self.images is not None:
            return
        suffixes = {file.suffix for file in self.all_files}
        readable = TEXT_SUFFIXES if self.table is None else TABLE_SUFFIXES
        readable = LABELLED_SUFFIXES if self.text_columns else readable
        unknown = sorted(suffixes - set(readable))
        if unknown:
            first = next(file.name for file in self.all_files if file.suffix == unknown[0])
            what = first if unknown[0] else f"{first}, which has no suffix"
            more = (
                " as text; data.table reads tables, data.labels texts with labels"
                if unknown[0] == ".csv"
                else ""
            )
            raise ValueError(f"cannot read {what}{more}; known: {', '.join(readable)}")
        if len(suffixes) > 1:
            raise ValueError(f"files are of several kinds: {', '.join(sorted(suffixes))}")

    def _require_distinct_files(self) -> None:
        """Raise ValueError if a file or folder is named twice, in one split or in two.

        Plain text for training may be named several times, so that the model reads it more often.
        """
        known = set[str]()
        for name in ("files", "validation_files", "test_files"):
            for file in getattr(self, name) or ():
                path = os.path.normpath(file)
                if path in known and not (self.is_plain_text and name == "files"):
                    raise ValueError(f"{name} names {path}, which data has already: name each file once")
                known.add(path)

    @property
    def is_text(self) -> bool:
        """Whether the samples are text, in rows with labels or pairs, or plain."""
        return self.dataset is None and self.table is None and self.images is None

    @property
    def is_plain_text(self) -> bool:
        """Whether the samples are text without labels and pairs, for language models."""
        return self.is_text and not self.text_columns

    @property
    def text_columns(self) -> dict[str, str]:
        """Columns of texts with labels, or of pairs of texts, by the field that names them; empty for other data."""
        if self.labels is not None:
            found = {"data.text_column": self.text_column, "data.labels.column": self.labels.column}
            return found if self.labels.pair is None else {**found, "data.labels.pair": self.labels.pair}
        if self.pairs is not None:
            return {"data.text_column": self.text_column, "data.pairs.column": self.pairs.column}
        return {}

    @property
    def all_files(self) -> tuple[Path, ...]:
        """All files: those of training, of validation and of the test, in this order."""
        return (*(self.files or ()), *(self.validation_files or ()), *(self.test_files or ()))

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image as a sample."""
        assert self.images is not None
        size = self.images if self.transforms is None else self.transforms.crop or self.images
        return (self.images.channels, size.height, size.width)

    @property
    def tiles(self) -> tuple[int, int] | None:
        """Number of tiles above and beside each other into which images are cut; None if they are not cut."""
        return None if isinstance(self.slicing, str) else self.slicing[2:]

    @property
    def validates(self) -> bool:
        """Whether samples are kept for validation."""
        return self.validation_files is not None or self.validation_fraction > 0


class TokenizerSpec(SpecModel):
    """Source of the tokenizer: a folder, or training on the data (byte-level BPE)."""

    path: TextPath | None = Field(default=None, title="Folder of the tokenizer")
    """Folder of a Hugging Face tokenizer; default: the model's own folder, if it has one."""
    vocab_size: int | None = Field(default=None, ge=257)
    """Vocabulary size of a tokenizer trained on the data; default: that of the model, if it is known."""

    @model_validator(mode="after")
    def _not_both(self) -> Self:
        if self.path is not None and self.vocab_size is not None:
            raise ValueError("give path, or vocab_size to train one, not both")
        return self
