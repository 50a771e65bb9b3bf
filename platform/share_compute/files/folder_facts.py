"""Facts about the model in a folder, as its own files state them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from share_compute.files.strict import StrictModel


class FolderFacts(StrictModel):
    """Facts about a model that can be served."""

    kind: Literal["generate", "embed"]
    """generate: writes text. embed: turns texts into vectors."""
    architecture: str = Field(max_length=100)
    """Name of the class in transformers, or the type of the model if its configuration names no class."""
    parameters: int = Field(ge=0)
    """Number of values in the files of the weights."""
    weights_bytes: int = Field(ge=0)
    """Size of the files of the weights, in bytes."""
    window_tokens: int | None = None
    """Longest sequence, in tokens; None if the configuration does not state it."""
    has_chat_template: bool
    """Whether the model can be used with chat completions."""
    licence: str | None = Field(default=None, max_length=80)
    """Licence in the front matter of the model card; None if there is none."""
