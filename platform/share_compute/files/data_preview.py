"""Previews of training data: the first rows, as the server sends them."""

from __future__ import annotations

from typing import Literal, TypeAlias

from share_compute.files.strict import StrictModel

Kind: TypeAlias = Literal["number", "category", "class", "text", "image"]
Cell: TypeAlias = str | float | None


class PreviewColumn(StrictModel):
    """A column of a preview."""

    name: str
    kind: Kind
    """Type of the values. An image is a small PNG file in base64; a missing number or category is null."""
    is_target: bool = False
    """Whether the model predicts this column."""


class DataPreview(StrictModel):
    """The first rows of data."""

    columns: tuple[PreviewColumn, ...]
    rows: tuple[tuple[Cell, ...], ...]
    """At most ten rows, each with a value for each column."""
    left_out: int = 0
    """Number of features that are not shown, because the table has too many."""
