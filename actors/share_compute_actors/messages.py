"""Everything that members, library and coordinator say to each other: declared, frozen, versioned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from share_compute.models.blueprint import Blueprint
from share_compute.planning.cost import LayerTiming
from share_compute.planning.partitioning import Shard
from share_compute.specification import TrainingSpec
from share_compute.topology import DeviceKind

WIRE_VERSION = 1

Phase = Literal["train", "validation", "test"]
Cargo = Literal["hello", "activation", "gradient", "norm", "tied"]


class MemberId(NamedTuple):
    """A member's place in the plan."""

    pool: int
    member: int

    def __str__(self) -> str:
        return f"{self.pool}.{self.member}"


class Label(NamedTuple):
    """Names one tensor on its way: who asks for a label gets exactly this tensor."""

    phase: Phase
    step: int
    cargo: Cargo
    microbatch: int
    pool: int
    """Pool that sent it."""


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
    """What a member is told once, before it loads its shard."""

    job: str
    epoch: int
    me: MemberId
    name: str
    """Of its machine."""
    address: str
    """IP address that the other members reach it at."""
    blueprint: Blueprint
    shard: Shard
    training: TrainingSpec
    microbatches: tuple[int, ...]
    """Ids of those that this member computes in each step."""
    shares: tuple[tuple[int, ...], ...]
    """Microbatches of each member of each pool, whose ids are contiguous blocks in this order."""
    threads: int
    device: DeviceKind
    deadline_s: float
    """Longest wait for another member; the coordinator notices sooner when one falls silent."""
    first_step: int
    tied: str | None = None
    """Stored name of the parameter that the first and the last pool share, if the model ties them."""

    @property
    def pool_sizes(self) -> tuple[int, ...]:
        """Members of each pool."""
        return tuple(len(members) for members in self.shares)


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a member listens, and with which public key."""

    me: MemberId
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


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one member says of one step."""

    me: MemberId
    step: int
    loss_sum: float | None
    """Cross entropy summed over its targets; only the last pool knows it."""
    targets: int
    gradient_norm: float | None
    seconds: float
    waited_s: float
    """Of ``seconds``, how long it waited for other members."""
    layer_timings: Mapping[int, LayerTiming] | None = None
    """Means over the first steps, of each layer of its shard; told once in an attempt."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What one member of the last pool says of some microbatches that are not trained on."""

    loss_sum: float
    targets: int
    correct: int


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A sign of life."""

    me: MemberId
    step: int
    resident_bytes: int
    peak_resident_bytes: int
