"""The field ``model`` of a training job."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from share_compute.specification.base import (
    COMMIT,
    HubName,
    Revision,
    SpecModel,
    TextPath,
    exactly_one,
    plain_json,
)
from share_compute.specification.layers import Layers


class ModelSpec(SpecModel):
    """The model to train: exactly one of ``path``, ``hub``, ``config`` and ``layers``.

    In a submitted job, ``path`` beside ``hub`` is the server's copy of the model; in a job file it is ignored. So is
    ``config`` beside ``hub`` at a commit: the server adds it to check and plan a job whose model is not fetched.
    """

    model_config = exactly_one("path", "hub", "config", "layers")

    path: TextPath | None = Field(default=None, title="Folder")
    """Hugging Face folder on the server (config.json, safetensors), or ``upload:ID``; training starts from it."""
    hub: HubName | None = Field(default=None, title="Name on the Hub")
    """Name of a public model on the Hugging Face Hub, which the server fetches; training starts from it."""
    revision: Revision | None = Field(default=None, title="Revision on the Hub")
    """Branch, tag or commit of ``hub``, default: main. The job keeps the commit that this was when it was submitted."""
    config: dict[str, Any] | None = Field(default=None, title="Configuration")
    """Hugging Face configuration with its ``model_type``; training starts from random weights."""
    layers: Layers | None = None
    """Declared list of torch layers; training starts from random weights."""

    @field_validator("config")
    @classmethod
    def _config_is_plain(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        plain_json(value)  # the configuration is stored and sent as JSON
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        names = ("hub" if self.hub is not None else "path", "config", "layers")
        given = [name for name in names if getattr(self, name) is not None]
        has_copy = given == ["hub", "config"] and COMMIT.match(self.revision or "") is not None
        if len(given) != 1 and not has_copy:
            found = ", ".join(given) or "none"
            raise ValueError(f"give exactly one of path, hub, config and layers; given: {found}")
        if self.revision is not None and self.hub is None:
            raise ValueError("revision is that of a model on the Hub: give hub, too")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config needs a model_type, e.g. llama")
        if self.layers is not None and not self.layers:
            raise ValueError("layers is empty")
        return self

    @property
    def is_pretrained(self) -> bool:
        """Whether training starts from weights of a folder or of the Hub."""
        return self.path is not None or self.hub is not None

    @property
    def folder_field(self) -> str:
        """Field of the job that names the folder of the model."""
        return "model.path" if self.hub is None else "model.hub"
