"""Codecs and options for the data that branches exchange after a round, and for the gradients that a stage sums."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from share_compute.specification.base import SpecModel, known_tag

Quantizer: TypeAlias = Literal["bf16", "int8", "int4", "int2", "sign"]
CODECS: Final = ("none", "bf16", "int8", "int4", "int2", "sign", "topk", "powersgd")


class NoCompressionSpec(SpecModel):
    """Send float32 values as they are."""

    name: Literal["none"] = "none"
    """Name of the codec."""


class LossyCompressionSpec(SpecModel):
    """Common options of codecs that lose information."""

    error_feedback: float | None = Field(default=1.0, gt=0, le=1, title="Error feedback")
    """Factor of the error of earlier rounds when it is added to the next tensor; null drops errors, and the memory."""
    from_step: int = Field(default=0, ge=0, le=2**31 - 1, title="First compressed step")
    """First step whose tensors are compressed; tensors of earlier steps are sent as they are."""


class QuantizationSpec(LossyCompressionSpec):
    """Send all values with fewer bits."""

    name: Quantizer
    """Name of the codec. int8 and int4 round to multiples of a scale, int2 sends a sign and one of two magnitudes."""


class TopKSpec(LossyCompressionSpec):
    """Send the values of largest magnitude of each chunk, with their places."""

    name: Literal["topk"] = "topk"
    """Name of the codec."""
    density: float = Field(default=0.01, gt=0, le=1)
    """Fraction of the values that are sent."""
    chunk: int = Field(default=4096, ge=2, le=2**14)
    """Number of consecutive values among which the largest ones are selected."""
    values: Literal["float32", "bf16", "int8", "int2"] = "float32"
    """Format of the selected values."""

    @model_validator(mode="after")
    def _keeps_something(self) -> Self:
        if self.kept(self.chunk) < 1:
            raise ValueError(
                f"density {self.density:g} keeps no value of a chunk of {self.chunk}; "
                f"the least density is {1 / self.chunk:g}"
            )
        return self

    def kept(self, length: int) -> int:
        """Return the number of values that are sent of ``length`` values."""
        return round(self.density * length)


class PowerSgdSpec(LossyCompressionSpec):
    """Send each matrix as a product of two matrices of low rank, and other tensors as they are."""

    name: Literal["powersgd"] = "powersgd"
    """Name of the codec."""
    rank: int = Field(default=4, ge=1, le=1024)
    """Rank of the product."""


CompressionSpec = Annotated[
    Annotated[NoCompressionSpec | QuantizationSpec | TopKSpec | PowerSgdSpec, Field(discriminator="name")],
    known_tag("name", CODECS, "codec"),
]
"""A codec with its options; the field ``name`` says which one."""

SPARSE_LOCO = TopKSpec(density=64 / 4096, chunk=4096, values="int2", error_feedback=0.95)
"""Settings of SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706): the 64 largest of 4,096 values, with two bits each."""
