"""Reads the operator's entries of the catalogue: ``catalogue.yaml`` in the data folder.

Example::

    models:
      - name: TinyLlama
        model: {hub: TinyLlama/TinyLlama-1.1B-Chat-v1.0}
        description: Answers in English; fits on one laptop.
        licence: apache-2.0
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Final, Self

from pydantic import Field, ValidationError, model_validator

from share_compute.errors import UserError
from share_compute.files.field_errors import field_errors
from share_compute.files.plain_text import PlainText
from share_compute.files.plain_yaml import MOST_BYTES, line_of, read_yaml
from share_compute.files.strict import StrictModel
from share_compute.models.huggingface.licence import LICENCE
from share_compute.specification import ServedModelSpec

CATALOGUE_FILE: Final = "catalogue.yaml"
"""Name of the file in the data folder."""
_MOST_MODELS: Final = 200


class OfferedModel(StrictModel):
    """A model that the operator offers."""

    name: PlainText = Field(min_length=1, max_length=80)
    """Name for people; unique in the file."""
    model: ServedModelSpec
    """The model, as in a deployment: ``{hub: OWNER/NAME}``, ``{path: FOLDER}`` or ``{job: ID}``."""
    description: PlainText | None = Field(default=None, max_length=500)
    licence: str | None = Field(default=None, pattern=LICENCE.pattern)
    """Identifier of the licence, such as ``apache-2.0``; default: that of the model card."""


class OperatorFile(StrictModel):
    """Content of ``catalogue.yaml``."""

    models: tuple[OfferedModel, ...] = Field(default=(), max_length=_MOST_MODELS)

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        twice = [name for name, times in Counter(one.name for one in self.models).items() if times > 1]
        if twice:
            raise ValueError(f"models: two have the name {twice[0]!r}; rename one")
        return self


def read_operator_file(file: Path) -> tuple[tuple[OfferedModel, ...], tuple[str, ...]]:
    """Return the models of a catalogue file, and its problems, each with its line; no models if there is a problem.

    A file that does not exist has no models and no problems.
    """
    try:
        with file.open("rb") as opened:
            text = opened.read(MOST_BYTES + 1).decode()
    except FileNotFoundError:
        return (), ()
    except (OSError, ValueError) as failure:
        return (), (f"{file.name} cannot be read: {failure}",)
    try:
        data: Any = read_yaml(text, file.name)
    except UserError as failure:
        return (), (failure.message,)
    try:
        return OperatorFile.model_validate({} if data is None else data).models, ()
    except ValidationError as failure:
        return (), tuple(_placed(file.name, text, **one) for one in field_errors(failure))


def _placed(name: str, text: str, *, field: str, problem: str) -> str:
    """Return a problem prefixed with its line and field."""
    where = f"{name}, line {line_of(text, field)}"
    return f"{where}: {field}: {problem}" if field else f"{where}: {problem}"
