"""The fields ``data`` and ``tokenizer`` of a training job."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from share_compute.specification.base import SpecModel, TextPath, exactly_one

TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet")
TABLE_SUFFIXES = (".csv", ".parquet")
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


class DataSpec(SpecModel):
    """Training data: ``files`` with text, tables or images, or a ``dataset`` that ships with a package."""

    model_config = exactly_one("files", "dataset")

    files: Annotated[tuple[TextPath, ...], Field(fail_fast=True)] | None = None
    """Files on the server, or of an upload: .txt, .jsonl, .parquet; as tables .csv, .parquet; as images folders."""
    dataset: Literal["digits"] | None = Field(default=None, title="Data set")
    """A data set that ships with scikit-learn: 1,797 handwritten digits of 8 x 8 pixels."""
    table: TableSpec | None = Field(default=None, title="Columns of tables")
    """Read the files as tables, with these columns; null: as text."""
    images: ImagesSpec | None = Field(default=None, title="Images")
    """Read the files as folders of images, with one folder for each class; null: as text."""
    validation_files: Annotated[tuple[TextPath, ...], Field(fail_fast=True)] | None = None
    """Tables or folders of images for validation, instead of ``validation_fraction``."""
    test_files: Annotated[tuple[TextPath, ...], Field(fail_fast=True)] | None = None
    """Tables or folders of images for the final test, instead of ``test_fraction``."""
    text_column: str = "text"
    """Column of .jsonl and .parquet files that holds the text."""
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
        if self.table is not None and self.images is not None:
            raise ValueError("files are tables or images: give table or images, not both")
        if self.table is None and self.images is None:
            for name in ("validation_files", "test_files"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} needs data.table or data.images: text is split by fractions")
        elif self.files is None:
            what = "table" if self.images is None else "images"
            raise ValueError(f"{what} says how data.files are read: give files instead of dataset")
        self._files_are_known()
        return self

    def _files_are_known(self) -> None:
        for name in ("files", "validation_files", "test_files"):
            if getattr(self, name) == ():
                raise ValueError(f"{name} is empty")
        if self.table is not None or self.images is not None:
            self._require_distinct_files()
        if self.images is not None:
            return
        suffixes = {file.suffix for file in self.all_files}
        readable = TEXT_SUFFIXES if self.table is None else TABLE_SUFFIXES
        unknown = sorted(suffixes - set(readable))
        if unknown:
            what = unknown[0] or "a file without suffix"
            more = " as text; data.table reads tables" if unknown[0] == ".csv" else ""
            raise ValueError(f"cannot read {what}{more}; known: {', '.join(readable)}")
        if len(suffixes) > 1:
            raise ValueError(f"files are of several kinds: {', '.join(sorted(suffixes))}")

    def _require_distinct_files(self) -> None:
        """Raise ValueError if a table or folder of images is named twice, in one split or in two."""
        known = set[str]()
        for name in ("files", "validation_files", "test_files"):
            for file in getattr(self, name) or ():
                path = os.path.normpath(file)
                if path in known:
                    raise ValueError(f"{name} names {path}, which data has already: name each file once")
                known.add(path)

    @property
    def is_text(self) -> bool:
        """Whether the samples are text."""
        return self.dataset is None and self.table is None and self.images is None

    @property
    def all_files(self) -> tuple[Path, ...]:
        """All files: those of training, of validation and of the test, in this order."""
        return (*(self.files or ()), *(self.validation_files or ()), *(self.test_files or ()))

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
