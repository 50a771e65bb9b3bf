"""Compression of the activations and gradients that neighbouring stages of a job exchange."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from share_compute.specification.base import SpecModel, known_tag

BoundaryCodec: TypeAlias = Literal["none", "bf16", "int8"]
"""Codec of the tensors that cross one boundary between stages; none sends them as they are."""
BOUNDARY_CODECS: Final[tuple[BoundaryCodec, ...]] = ("none", "bf16", "int8")
"""All codecs, in the order of their compression."""
_NAMES: Final = (*BOUNDARY_CODECS, "auto", "fixed")
_MOST_LAYERS: Final = 4096
_Layers: TypeAlias = tuple[Annotated[int, Field(ge=1, le=2**31 - 1)], ...]


class NoBoundaryCompressionSpec(SpecModel):
    """Send activations and gradients as they are."""

    name: Literal["none"] = "none"
    """Codec of activations and gradients: auto chooses the least that each link needs, fixed names layers."""

    def codec(self, layer: int) -> BoundaryCodec:  # noqa: ARG002 - the same for all layers
        """Return the codec of the tensors between layer ``layer - 1`` and layer ``layer``."""
        return "none"


NO_BOUNDARY_COMPRESSION: Final = NoBoundaryCompressionSpec()


class PlannedBoundaryCompressionSpec(SpecModel):
    """Compress what crosses the boundaries of the job's first plan."""

    name: Literal["bf16", "int8", "auto"]
    """Codec of activations and gradients: auto chooses the least that each link needs, fixed names layers."""

    def codec(self, layer: int) -> BoundaryCodec:  # noqa: ARG002 - the same for all layers
        """Return the codec of the tensors between two layers, if the first plan cuts the model before ``layer``.

        Return None for auto, because the planner has not chosen yet.
        """
        return "none" if self.name == "auto" else self.name


class FixedBoundaryCompressionSpec(SpecModel):
    """Round what passes between certain layers, and send it compressed where the model is cut."""

    name: Literal["fixed"] = "fixed"
    """Codec of activations and gradients: auto chooses the least that each link needs, fixed names layers."""
    bf16: _Layers = Field(default=(), title="Layers with bf16", max_length=_MOST_LAYERS, fail_fast=True)
    """Layers, counted from 0, before which bf16 is used."""
    int8: _Layers = Field(default=(), title="Layers with int8", max_length=_MOST_LAYERS, fail_fast=True)
    """Layers, counted from 0, before which int8 is used."""

    @model_validator(mode="after")
    def _each_layer_once(self) -> Self:
        twice = sorted(layer for layer, count in Counter((*self.bf16, *self.int8)).items() if count > 1)
        if twice:
            raise ValueError(f"bf16 and int8 name layer {twice[0]} more than once")
        return self

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers before which values are rounded, in order."""
        return tuple(sorted((*self.bf16, *self.int8)))

    def codec(self, layer: int) -> BoundaryCodec:
        """Return the codec of the tensors between layer ``layer - 1`` and layer ``layer``."""
        return "bf16" if layer in self.bf16 else "int8" if layer in self.int8 else "none"


def fixed_boundaries(codecs: Mapping[int, BoundaryCodec]) -> FixedBoundaryCompressionSpec:
    """Return the specification with these codecs before these layers."""
    before = {
        name: tuple(layer for layer, codec in codecs.items() if codec == name) for name in BOUNDARY_CODECS
    }
    return FixedBoundaryCompressionSpec(bf16=before["bf16"], int8=before["int8"])


BoundaryCompression: TypeAlias = (
    NoBoundaryCompressionSpec | PlannedBoundaryCompressionSpec | FixedBoundaryCompressionSpec
)
BoundaryCompressionSpec = Annotated[
    Annotated[BoundaryCompression, Field(discriminator="name")],
    known_tag("name", _NAMES, "boundary compression"),
]
"""Compression at the boundaries between stages; the field ``name`` says which one."""
