"""The field ``model`` of a training job."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from share_compute.specification.base import SpecModel, TextPath, exactly_one, known, plain_json

MOST_DECLARED_LAYERS = 10_000
LAYER_TYPES = (
    "avg_pool2d", "conv2d", "dropout", "flatten", "gelu", "layer_norm",
    "linear", "max_pool2d", "relu", "sigmoid", "tanh", "unflatten",
)  # fmt: skip


class LayerSpec(SpecModel):
    """One declared torch layer of a model that is given as a list of layers."""

    type: str = Field(json_schema_extra={"enum": list(LAYER_TYPES)})
    """Name of the layer: linear, conv2d, relu, ..."""
    options: dict[str, int | float | bool | list[int]] = Field(default_factory=dict)
    """Arguments of the torch module, e.g. ``{in_features: 64, out_features: 128}``."""

    @field_validator("options", mode="before")
    @classmethod
    def _options_are_plain(cls, value: Any) -> Any:
        for name, option in value.items() if isinstance(value, dict) else ():
            whole = isinstance(option, list) and all(type(item) is int for item in option)
            if not whole and not isinstance(option, int | float):
                raise ValueError(
                    f"{name} must be a number, true, false or a list of whole numbers, not {option!r}"
                )
        return value

    @field_validator("type", mode="before")
    @classmethod
    def _layer_exists(cls, value: Any) -> Any:
        return known(value, LAYER_TYPES, "layer type")


class ModelSpec(SpecModel):
    """The model to train: exactly one of ``path``, ``config`` and ``layers``."""

    model_config = exactly_one("path", "config", "layers")

    path: TextPath | None = Field(default=None, title="Folder")
    """Hugging Face folder on the server (config.json, safetensors), or ``upload:ID``; training starts from it."""
    config: dict[str, Any] | None = Field(default=None, title="Configuration")
    """Hugging Face configuration with its ``model_type``; training starts from random weights."""
    layers: tuple[LayerSpec, ...] | None = None
    """Declared list of torch layers; training starts from random weights."""

    @field_validator("layers", mode="before")
    @classmethod
    def _not_too_many_layers(cls, value: Any) -> Any:
        # Checked before the layers, because each wrong layer would be a problem of its own.
        if isinstance(value, list | tuple) and len(value) > MOST_DECLARED_LAYERS:
            raise ValueError(f"{len(value)} layers are given; at most {MOST_DECLARED_LAYERS} are read")
        return value

    @field_validator("config")
    @classmethod
    def _config_is_plain(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        plain_json(value)  # the configuration is stored and sent as JSON
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in ("path", "config", "layers") if getattr(self, name) is not None]
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise ValueError(f"give exactly one of path, config and layers; given: {found}")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config needs a model_type, e.g. llama")
        if self.layers is not None and not self.layers:
            raise ValueError("layers is empty")
        return self
