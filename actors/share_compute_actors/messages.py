"""Everything that members, library and coordinator say to each other: declared, frozen, versioned."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import xxhash
from pydantic import Field

from share_compute.errors import VerificationFailed
from share_compute.models.blueprint import Blueprint
from share_compute.planning.timings import LayerTiming
from share_compute.protocol.failures import Failure
from share_compute.protocol.messages import Label as ProtocolLabel
from share_compute.protocol.roster import Worker
from share_compute.specification import TrainingSpec
from share_compute.topology import DeviceKind
from share_compute_actors.wire import Natural, Schema, Seconds, StepNumber

WIRE_VERSION = 2
_SEAL = struct.Struct(">BQ")
"""What an envelope begins with: version of the wire, and checksum of all that follows."""

Phase = Literal["form", "train", "validation", "test", "sample", "serve"]


FolderKind = Literal["checkpoint", "artifact"]
"""A checkpoint has all that training goes on with; an artifact what was learnt, for others to use."""


Content = bytes | memoryview
"""The bytes of a tensor."""


class Label(NamedTuple):
    """Names one tensor on its way: who asks for a label gets exactly this tensor."""

    phase: Phase
    step: StepNumber
    """Of training; in serving, id of the turn."""
    cargo: Literal["hello", "key", "activation", "gradient", "tied", "log", "logged", "token"]
    microbatch: Annotated[int, Field(ge=-1, lt=2**53)]
    """-1 where none is meant."""
    pool: Natural
    """Pool that sent it."""

    @property
    def is_of_protocol(self) -> bool:
        """Whether the protocol has a name for it."""
        return self.cargo in ("activation", "gradient", "tied", "log")

    @property
    def of_protocol(self) -> ProtocolLabel:
        """What the protocol calls it."""
        assert self.cargo != "hello"
        assert self.cargo != "key"
        assert self.cargo != "logged"
        assert self.cargo != "token"
        return ProtocolLabel(self.step, self.cargo, self.microbatch, self.pool)

    @property
    def is_of_step(self) -> bool:
        """Whether the step protocol waits for it, not a greeting or an evaluation."""
        return self.phase == "train" and self.cargo != "hello"


@dataclass(frozen=True, slots=True)
class Envelope:
    """What stands before every tensor on the wire."""

    job: str
    epoch: int
    label: Label
    dtype: str
    shape: tuple[int, ...]
    source: Worker = ""
    """Who sent it."""
    number: int = 0
    """How many tensors its sender sent on this link in this epoch, with this one; of a greeting: before it. 0 where the
    link counts nothing."""

    def pack(self, content: Content) -> bytes:
        """Write as JSON, sealed together with the content: the seal breaks when a bit of either is changed."""
        written = _FIELDS.pack(
            (self.job, self.epoch, self.label, self.dtype, self.shape, self.source, self.number)
        )
        return _SEAL.pack(WIRE_VERSION, _checksum(written, content)) + written

    @classmethod
    def unpack(cls, data: bytes, content: Content) -> Envelope:
        """Read what `pack` wrote.

        Raises:
            ValueError: it is not an envelope of this version.
            VerificationFailed: it, or its content, is not what was sent.
            Undeclared: its fields are not those of an envelope.
        """
        if not data or data[0] != WIRE_VERSION:
            raise ValueError(f"envelope of version {data[0] if data else None}")
        _, checksum = _SEAL.unpack_from(data)
        written = data[_SEAL.size :]
        if checksum != _checksum(written, content):
            raise VerificationFailed(
                f"a tensor of {len(content)} bytes was damaged on its way",
                mend="check memory and network of the machines that it came from and to",
            )
        return cls(*_FIELDS.unpack(written, "a member"))


_MOST_DIMENSIONS = 16
_Name = Annotated[str, Field(max_length=200)]
_Size = Annotated[int, Field(gt=-(2**53), lt=2**53)]
_FIELDS: Schema[tuple[Any, ...]] = Schema(
    tuple[
        _Name,
        Natural,
        Label,
        _Name,
        Annotated[tuple[_Size, ...], Field(max_length=_MOST_DIMENSIONS)],
        _Name,
        Natural,
    ],
    most_bytes=2**14,
)
"""Of an `Envelope`. A receiver names the sender of a wrong tensor in messages to the coordinator. All that it repeats
there must pass their schemas, or the receiver itself would count as the one that sent something undeclared."""


def _checksum(written: bytes, content: Content) -> int:
    """Return XXH3-64 of a content under this envelope; no other pair of the two has the same one."""
    return xxhash.xxh3_64_intdigest(content, seed=xxhash.xxh3_64_intdigest(written))


@dataclass(frozen=True, slots=True)
class MemberSetup:
    """What a member is told when it is started."""

    job: str
    worker: Worker
    """Its own name: the contributor that it runs on."""
    name: str
    """Of its machine, for people."""
    address: str
    """IP address that the other members reach it at."""
    blueprint: Blueprint
    training: TrainingSpec
    runs: tuple[int, ...]
    """Of the `SummationTree` of the job."""
    threads: int
    device: DeviceKind
    gpu: str
    """UUID of the GPU that was measured; empty for a CPU."""
    deadline_s: float
    """Longest wait for another member; the coordinator notices sooner when one falls silent."""
    applied: int
    """Last step whose update its weights have when it begins."""
    tied: str | None = None
    """Stored name of the parameter that the first and the last pool share, if the model ties them."""
    lent_bytes: int = 0
    """Memory of the machine itself, not of a graphics processor, that its owner lends; 0 where that is not known."""
    failures: tuple[Failure, ...] = ()
    """What goes wrong, in tests."""


class Source(NamedTuple):
    """An actor that has tensors for others to load."""

    actor: Any
    """The library, or a member."""
    name: str
    """Of its machine, for people."""
    worker: Worker | None
    """The member; None: it is the library."""
    shard: tuple[int, int] | None = None
    """Of the copy that a member keeps of another's shard; None: what the actor itself holds."""

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of it, and return the reference to what it answers."""
        return getattr(self.actor, method).remote(*self.asked(*arguments))

    def asked(self, *arguments: Any) -> tuple[Any, ...]:
        """Return what a method takes for these arguments: of a copy, its layers come last."""
        return arguments if self.shard is None else (*arguments, self.shard)


def library_source(actor: Any) -> Source:
    """Return the actor that reads the files of a model as somebody to load from."""
    return Source(actor, "the server", None)


@dataclass(frozen=True, slots=True)
class Sources:
    """Who has the parameters, buffers and optimizer state that a member loads."""

    all: tuple[Source, ...]
    places: Mapping[str, int] = field(default_factory=dict)
    """By stored name, which of them; the first has all that is not named here."""

    def place(self, name: str) -> int:
        """Return which of them has this parameter or buffer."""
        return self.places.get(name, 0)


class Extent(NamedTuple):
    """Rows of a tensor that are loaded."""

    name: str
    """As it is stored."""
    start: Natural
    stop: Natural | None
    """One past the last row; None: all from ``start`` on, or a tensor without rows."""


_EXTENTS: Schema[tuple[Extent, ...]] = Schema(tuple[Extent, ...])


def pack_extents(extents: Sequence[Extent]) -> bytes:
    """Return as bytes what is asked of somebody who has tensors."""
    return _EXTENTS.pack(tuple(extents))


def read_extents(data: bytes) -> tuple[Extent, ...]:
    """Return what `pack_extents` wrote.

    Raises:
        Undeclared: it is something else.
    """
    return _EXTENTS.unpack(data, "a member")


class Followed(NamedTuple):
    """Whose shard a member keeps a copy of."""

    owner: Worker
    actor: Any
    """Its member."""
    shard: tuple[int, int]
    """Layers [start, stop)."""
    place: int = 0
    """Of who keeps it, among all that keep a copy of this owner's."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a member listens, and with which public key."""

    worker: Worker
    name: str
    endpoint: str
    public_key: bytes


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """What the members of one pool need to form their group."""

    group: str
    """Unique for each job, epoch and pool."""
    members: tuple[Worker, ...]
    timeout_s: float
    address: str = ""
    """This member's own address."""
    algorithm: Literal["auto", "ring", "tree", "sharded"] = "auto"
    """How tensors are summed over the members: by size, or always in this way. On GPUs NCCL chooses."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What one member says of one step beside what the protocol needs."""

    targets: Natural
    """Of one microbatch; only the last pool knows it, others say 0."""
    seconds: Seconds
    waited_s: Seconds
    """Of ``seconds``, how long it waited for other members."""
    layer_timings: Mapping[int, LayerTiming] | None = None
    """Means over the first steps, of each layer of its shard; told once in an epoch."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What one member of the last pool says of some microbatches that are not trained on."""

    loss_sum: float
    targets: Natural
    correct: Natural


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A sign of life."""

    worker: Worker
    step: StepNumber
    """Last one whose update its weights have."""
    resident_bytes: Natural
    peak_resident_bytes: Natural
    reaches: StepNumber = 0
    """Last step whose update its weights have, or could be given at once: its gradient is there."""
    holds: tuple[int, int] | None = None
    """Layers [start, stop) whose weights are here."""
    loaded: tuple[int, int] | None = None
    """Layers that were loaded, and are not worked with before it is told to."""
    loaded_step: StepNumber = 0
    """Last step whose update those have."""
    unacknowledged: tuple[str, ...] = ()
    """Messages to the coordinator that it has not acknowledged in time, as they were sent."""
