"""The fields ``data`` and ``tokenizer`` of a training job."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from share_compute.specification.base import SpecModel, TextPath, exactly_one

TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet")


class DataSpec(SpecModel):
    """Training data: text ``files``, or a ``dataset`` that ships with a package."""

    model_config = exactly_one("files", "dataset")

    files: Annotated[tuple[TextPath, ...], Field(fail_fast=True)] | None = None
    """Text files on the server, or of an upload: .txt, .jsonl or .parquet, all of one kind."""
    dataset: Literal["digits"] | None = Field(default=None, title="Data set")
    """A data set that ships with scikit-learn: 1,797 handwritten digits of 8 x 8 pixels."""
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
        if self.files is not None:
            if not self.files:
                raise ValueError("files is empty")
            suffixes = {file.suffix for file in self.files}
            unknown = sorted(suffixes - set(TEXT_SUFFIXES))
            if unknown:
                what = unknown[0] or "a file without suffix"
                raise ValueError(f"cannot read {what}; known: {', '.join(TEXT_SUFFIXES)}")
            if len(suffixes) > 1:
                raise ValueError(f"files are of several kinds: {', '.join(sorted(suffixes))}")
        return self


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
