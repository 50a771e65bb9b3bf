"""The envelope: the header of every tensor on the wire, with a checksum and the label that identifies the tensor."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import xxhash
from pydantic import Field

from share_compute.errors import VerificationFailed
from share_compute.protocol.membership import Worker
from share_compute.protocol.messages import TensorLabel
from share_compute_actors.wire import Natural, Schema, StepNumber

WIRE_VERSION = 2
_SEAL = struct.Struct(">BQ")
"""Start of an envelope: wire version (1 byte), then the checksum of everything that follows (8 bytes)."""
Phase = Literal["form", "train", "validation", "test", "sample", "serve"]
Content = bytes | memoryview
"""The bytes of a tensor."""


class WireLabel(NamedTuple):
    """Identifies one tensor in transit: a receiver that waits for a label gets exactly this tensor."""

    phase: Phase
    step: StepNumber
    """Training step; in serving, the id of the engine step."""
    cargo: Literal["hello", "key", "activation", "gradient", "tied", "log", "logged", "token"]
    microbatch: Annotated[int, Field(ge=-1, lt=2**53)]
    """Microbatch id; -1 if the tensor belongs to no microbatch."""
    stage: Natural
    """Index of the stage that sent the tensor."""

    @property
    def is_of_protocol(self) -> bool:
        """Whether the step protocol has a label for this tensor."""
        return self.cargo in ("activation", "gradient", "tied", "log")

    @property
    def of_protocol(self) -> TensorLabel:
        """The step protocol's label for this tensor."""
        assert self.cargo != "hello"
        assert self.cargo != "key"
        assert self.cargo != "logged"
        assert self.cargo != "token"
        return TensorLabel(self.step, self.cargo, self.microbatch, self.stage)

    @property
    def is_of_step(self) -> bool:
        """Whether the tensor belongs to a training step; false for handshakes, evaluations and serving."""
        return self.phase == "train" and self.cargo != "hello"


@dataclass(frozen=True, slots=True)
class Envelope:
    """The header that precedes every tensor on the wire."""

    job: str
    epoch: int
    label: WireLabel
    dtype: str
    shape: tuple[int, ...]
    source: Worker = ""
    """The member that sent the tensor."""
    number: int = 0
    """Number of tensors sent on this link in this epoch, including this one but not handshakes; 0 if the link does not
    count tensors."""

    def pack(self, content: Content) -> bytes:
        """Return the envelope as bytes: version, checksum, JSON. The checksum covers the JSON and ``content``."""
        written = _FIELDS.pack(
            (self.job, self.epoch, self.label, self.dtype, self.shape, self.source, self.number)
        )
        return _SEAL.pack(WIRE_VERSION, _checksum(written, content)) + written

    @classmethod
    def unpack(cls, data: bytes, content: Content) -> Envelope:
        """Return the envelope that `pack` wrote.

        Raises:
            ValueError: the data is not an envelope of this version.
            VerificationFailed: the envelope or its content does not match the checksum.
            Undeclared: the fields are not those of an envelope.
        """
        if not data or data[0] != WIRE_VERSION:
            raise ValueError(f"envelope of version {data[0] if data else None}")
        _, checksum = _SEAL.unpack_from(data)
        written = data[_SEAL.size :]
        if checksum != _checksum(written, content):
            raise VerificationFailed(
                f"a tensor of {len(content)} bytes was damaged in transit",
                hint="check memory and network of the machines that sent and received it",
            )
        return cls(*_FIELDS.unpack(written, "a member"))


_MOST_DIMENSIONS = 16
_Name = Annotated[str, Field(max_length=200)]
_Size = Annotated[int, Field(gt=-(2**53), lt=2**53)]
_FIELDS: Schema[tuple[Any, ...]] = Schema(
    tuple[
        _Name,
        Natural,
        WireLabel,
        _Name,
        Annotated[tuple[_Size, ...], Field(max_length=_MOST_DIMENSIONS)],
        _Name,
        Natural,
    ],
    most_bytes=2**14,
)
"""Schema of the fields of an `Envelope`.

A member that receives a wrong tensor reports some of these fields to the coordinator. The limits keep the report valid.
After an invalid report the coordinator would count the receiver as lost, not the sender."""


def _checksum(written: bytes, content: Content) -> int:
    """Return the XXH3-64 hash of ``content``, seeded with the hash of ``written``, so that the result covers both."""
    return xxhash.xxh3_64_intdigest(content, seed=xxhash.xxh3_64_intdigest(written))
