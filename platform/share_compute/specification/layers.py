"""Declared layers of a model, and blocks of them: ``sequential``, ``residual`` and ``repeat``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from share_compute.errors import UserError
from share_compute.files.strict import suggestion
from share_compute.specification.base import SpecModel, known

MOST_DECLARED_LAYERS = 10_000
MOST_NESTED_BLOCKS = 8
"""Maximum number of blocks that contain each other."""
MODULE_TYPES = (
    "adaptive_avg_pool2d", "adaptive_max_pool2d", "avg_pool2d", "batch_norm1d", "batch_norm2d", "conv2d", "dropout",
    "dropout2d", "embedding", "embedding_bag", "flatten", "gelu", "group_norm", "layer_norm", "linear", "max_pool2d",
    "relu", "sigmoid", "silu", "tanh", "unflatten",
)  # fmt: skip
"""Layers that are torch modules."""
_EMBEDDING = ("num_embeddings", "embedding_dim", "padding_idx")
"""Options of embeddings. With the others of torch, results depend on the plan, or gradients are sparse.

``max_norm`` changes weights in the forward pass. ``scale_grad_by_freq`` counts the tokens of a microbatch.
"""
_NORM = ("num_features", "eps", "momentum", "affine")
_WINDOW = ("kernel_size", "stride", "padding", "ceil_mode")
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "adaptive_avg_pool2d": ("output_size",),
    "adaptive_max_pool2d": ("output_size", "return_indices"),
    "avg_pool2d": (*_WINDOW, "count_include_pad", "divisor_override"),
    "batch_norm1d": _NORM,
    "batch_norm2d": _NORM,
    "conv2d": (
        "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias",
        "padding_mode", "device",
    ),
    "dropout": ("p", "inplace"),
    "dropout2d": ("p", "inplace"),
    "embedding": _EMBEDDING,
    "embedding_bag": _EMBEDDING,
    "flatten": ("start_dim", "end_dim"),
    "gelu": ("approximate",),
    "group_norm": ("num_groups", "num_channels", "eps", "affine", "bias", "device"),
    "layer_norm": ("normalized_shape", "eps", "elementwise_affine", "bias", "device"),
    "linear": ("in_features", "out_features", "bias", "device"),
    "max_pool2d": (*_WINDOW, "dilation", "return_indices"),
    "relu": ("inplace",),
    "sigmoid": (),
    "silu": ("inplace",),
    "tanh": (),
    "unflatten": ("dim", "unflattened_size"),
}  # fmt: skip
"""Arguments of each torch module, as far as a job file can give them; some are refused later, with the reason."""
EMBEDDINGS = ("embedding", "embedding_bag")
"""Layers that take token ids."""
BATCH_NORMS = ("batch_norm1d", "batch_norm2d")
BLOCK_TYPES = ("repeat", "residual", "sequential")
"""Layers that consist of other layers."""
LAYER_TYPES = (*MODULE_TYPES, *BLOCK_TYPES)
_TOO_MANY = f"more than {MOST_DECLARED_LAYERS} layers are given, counted as often as they are repeated"
_FIELD = "model.layers"
_NESTED = WithJsonSchema({"type": "array", "items": {"type": "object"}})
"""JSON schema of layers in a block. A reference to the schema of a layer would be endless for forms."""


class LayerSpec(SpecModel):
    """One declared layer: a torch module, or a block of layers."""

    type: str = Field(json_schema_extra={"enum": list(LAYER_TYPES)})
    """Name of the layer: linear, conv2d, relu, ..., or of a block: residual, sequential, repeat."""
    options: dict[str, int | float | bool | list[int]] = Field(default_factory=dict)
    """Arguments of the torch module, e.g. ``{in_features: 64, out_features: 128}``."""
    layers: Annotated[tuple[LayerSpec, ...], _NESTED] | None = None
    """Layers of a block, each with the same fields as this one."""
    projection: Annotated[tuple[LayerSpec, ...], _NESTED] | None = None
    """Layers on the shortcut of a residual block, e.g. a 1 x 1 conv2d; default: the block's input is added as it is."""
    times: Annotated[int, Field(strict=True, ge=1, le=MOST_DECLARED_LAYERS)] | None = None
    """Number of times that a repeat block has its layers, each time with weights of their own."""

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

    @model_validator(mode="after")
    def _fields_fit_the_type(self) -> Self:
        is_block = self.type in BLOCK_TYPES
        for name in self.options if not is_block else ():
            if name not in OPTIONS[self.type]:
                known_names = ", ".join(OPTIONS[self.type]) or "none"
                guess = suggestion(name, OPTIONS[self.type]) or f"; its options: {known_names}"
                raise ValueError(f"{self.type} has no option {name!r}{guess}")
        if is_block and not self.layers:
            raise ValueError(f"{self.type} needs layers, a list of at least one layer")
        if is_block and self.options:
            raise ValueError(f"{self.type} takes no options: give them to its layers")
        for layer in (*(self.layers or ()), *(self.projection or ())):
            if layer.type in EMBEDDINGS:  # its padding token follows from the data
                raise ValueError(f"{layer.type} cannot be inside a block: put it before the block")
        if not is_block and self.layers is not None:
            raise ValueError(f"{self.type} has no layers: only {', '.join(BLOCK_TYPES)} have")
        if self.projection is not None and (self.type != "residual" or not self.projection):
            raise ValueError("projection is for residual only, and has at least one layer")
        if (self.times is not None) != (self.type == "repeat"):
            raise ValueError("repeat needs times" if self.type == "repeat" else "times is for repeat only")
        return self


class PlacedLayer(NamedTuple):
    """A layer after the expansion of ``repeat`` blocks."""

    field: str
    """Path of the layer's field in the job file, e.g. ``model.layers.2.layers.0``; repeated layers share it."""
    spec: LayerSpec
    """The layer; not a ``repeat`` block."""


def expanded(layers: Sequence[LayerSpec], field: str = _FIELD) -> list[PlacedLayer]:
    """Return layers with each ``repeat`` block replaced by its repeated layers; other blocks are kept.

    Args:
        layers: declared layers.
        field: path of their field in the job file.

    Raises:
        UserError: the layers, with their repetitions, are more than `MOST_DECLARED_LAYERS`.
    """
    if _count(layers, (), 0) > MOST_DECLARED_LAYERS:
        raise UserError(f"{field}: {_TOO_MANY}", hint="lower times of a repeat block")
    return _expanded(layers, field)


def _expanded(layers: Sequence[LayerSpec], field: str) -> list[PlacedLayer]:
    found: list[PlacedLayer] = []
    for index, layer in enumerate(layers):
        place = f"{field}.{index}"
        if layer.type == "repeat":
            found += _expanded(layer.layers or (), f"{place}.layers") * (layer.times or 1)
        else:
            found.append(PlacedLayer(place, layer))
    return found


def every_module(layers: Sequence[LayerSpec]) -> Iterator[LayerSpec]:
    """Yield each declared torch module once, also those in blocks, in the order of the file."""
    for layer in layers:
        if layer.type in BLOCK_TYPES:
            yield from every_module((*(layer.layers or ()), *(layer.projection or ())))
        else:
            yield layer


_IN_TILES = ("avg_pool2d", "conv2d", "gelu", "max_pool2d", "relu", "sigmoid", "silu", "tanh")
"""Layers whose outputs depend on a window of their inputs, or on one of them."""


def reason_against_tiles(layer: LayerSpec) -> str | None:
    """Return why a block with this layer cannot be computed in tiles of an image; None if it can.

    Args:
        layer: a torch module.
    """
    options = layer.options
    if layer.type in BATCH_NORMS:
        return f"{layer.type} needs the statistics of all tiles: put it after the block"
    if layer.type not in _IN_TILES:
        return f"{layer.type} needs whole images: put it after the block"
    if options.get("ceil_mode", False):
        return f"{layer.type} has ceil_mode, with windows beyond the padding: leave it out"
    is_padded = options.get("padding", 0) not in (0, [0], [0, 0])
    if layer.type == "avg_pool2d" and is_padded and not options.get("count_include_pad", True):
        return "avg_pool2d has count_include_pad: false, with other divisors at the edges of an image: leave it out"
    return None


def require_few(value: Any) -> Any:
    """Return ``value``, but refuse layers that are nested too deep or, with their repetitions, are too many.

    The check runs before the layers are validated, because each wrong layer would be reported separately. It runs again
    afterwards, because only then all numbers are known to be integers.
    """
    if _count(value, (), 0) > MOST_DECLARED_LAYERS:
        raise ValueError(_TOO_MANY)
    return value


def _count(layers: Any, place: tuple[int | str, ...], depth: int) -> int:
    """Return the number of modules that some layers of a document have; stop soon after the maximum is exceeded."""
    if not isinstance(layers, list | tuple):
        return 0
    if depth > MOST_NESTED_BLOCKS:
        error = PydanticCustomError(
            "nested_too_deep", "at most {most} blocks may be nested", {"most": MOST_NESTED_BLOCKS}
        )
        raise ValidationError.from_exception_data(
            "layers", [InitErrorDetails(type=error, loc=place, input=None)]
        )
    if len(layers) > MOST_DECLARED_LAYERS:
        return len(layers)
    total = 0
    for index, layer in enumerate(layers):
        fields = layer if isinstance(layer, dict) else getattr(layer, "__dict__", {})
        times = fields.get("times")
        # validation reports a wrong number with its field
        factor = times if isinstance(times, int) and 0 < times <= MOST_DECLARED_LAYERS else 1
        inner = sum(
            _count(fields.get(name), (*place, index, name), depth + 1) for name in ("layers", "projection")
        )
        total += max(1, inner) * factor
        if total > MOST_DECLARED_LAYERS:
            break
    return total


Layers = Annotated[tuple[LayerSpec, ...], BeforeValidator(require_few), AfterValidator(require_few)]
"""Declared layers of a model."""
