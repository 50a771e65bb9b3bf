"""Everything that members, library and coordinator say to each other: declared, frozen, versioned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from share_compute.models.blueprint import Blueprint
from share_compute.planning.timings import LayerTiming
from share_compute.protocol.failures import Failure
from share_compute.protocol.roster import Worker
from share_compute.specification import TrainingSpec
from share_compute.topology import DeviceKind

WIRE_VERSION = 1

Phase = Literal["train", "validation", "test", "sample"]


FolderKind = Literal["checkpoint", "artifact"]
"""A checkpoint has all that training goes on with; an artifact what was learnt, for others to use."""


class Label(NamedTuple):
    """Names one tensor on its way: who asks for a label gets exactly this tensor."""

    phase: Phase
    step: int
    cargo: Literal["hello", "activation", "gradient", "tied", "log"]
    microbatch: int
    pool: int
    """Pool that sent it."""
    part: int = 0
    """Of a cargo that is too large for one message."""

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
    version: int = WIRE_VERSION

    def pack(self) -> bytes:
        """Write as JSON."""
        return json.dumps([self.version, self.job, self.epoch, self.label, self.dtype, self.shape]).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Envelope:
        """Read what `pack` wrote.

        Raises:
            ValueError: it is not an envelope of this version.
        """
        version, job, epoch, label, dtype, shape = json.loads(data)
        if version != WIRE_VERSION:
            raise ValueError(f"envelope of version {version}")
        return cls(job, epoch, Label(*label), dtype, tuple(shape))


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
    deadline_s: float
    """Longest wait for another member; the coordinator notices sooner when one falls silent."""
    applied: int
    """Last step whose update its weights have when it begins."""
    tied: str | None = None
    """Stored name of the parameter that the first and the last pool share, if the model ties them."""
    failures: tuple[Failure, ...] = ()
    """What goes wrong, in tests."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Who has the parameters, buffers and optimizer state that a member loads."""

    handles: tuple[Any, ...]
    """Actors: the library, or members of the epoch before."""
    places: Mapping[str, int] = field(default_factory=dict)
    """By stored name, which of them; the first has all that is not named here."""

    def of(self, name: str) -> Any:
        """Return the actor that has this parameter or buffer."""
        return self.handles[self.places.get(name, 0)]


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a member listens, and with which public key."""

    worker: Worker
    name: str
    endpoint: str
    public_key: bytes


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the members of one pool meet to form their group."""

    group: str
    """Unique for each job, epoch and pool."""
    host: str
    port: int
    timeout_s: float
    address: str = ""
    """This member's own address."""
    algorithm: Literal["auto", "ring", "tree", "sharded"] = "auto"
    """How tensors are summed over the members: by size, or always in this way. On GPUs NCCL chooses."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What one member says of one step beside what the protocol needs."""

    targets: int
    """Of one microbatch; only the last pool knows it, others say 0."""
    seconds: float
    waited_s: float
    """Of ``seconds``, how long it waited for other members."""
    layer_timings: Mapping[int, LayerTiming] | None = None
    """Means over the first steps, of each layer of its shard; told once in an epoch."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What one member of the last pool says of some microbatches that are not trained on."""

    loss_sum: float
    targets: int
    correct: int


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A sign of life."""

    worker: Worker
    step: int
    resident_bytes: int
    peak_resident_bytes: int
