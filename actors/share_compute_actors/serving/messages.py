"""What the members and the server of a deployment say to each other, beside turns: declared and frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from share_compute.errors import ShareComputeError
from share_compute.models.blueprint import Blueprint
from share_compute.models.encoders import Pooling
from share_compute.planning.workload import ServedPrecision
from share_compute.protocol.roster import Worker
from share_compute.serving.placement import Holding
from share_compute.serving.turns import TurnResult
from share_compute.topology import DeviceKind
from share_compute_actors.wire import Messages, Natural, Raised, Schema, Seconds


@dataclass(frozen=True, slots=True)
class ServingSetup:
    """What a member is told when it is started."""

    deployment: str
    """Id of the deployment, and of the replica of it: tensors of others are dropped."""
    worker: Worker
    """Its own name: the contributor that it runs on."""
    name: str
    """Of its machine, for people."""
    address: str
    """IP address that the other members reach it at."""
    blueprint: Blueprint
    dtype: ServedPrecision
    """What it loads weights as, and computes in."""
    window_tokens: int
    """Longest sequence."""
    threads: int
    device: DeviceKind
    gpu: str
    """UUID of the GPU that was measured; empty for a CPU."""
    pooling: Pooling | None = None
    """How vectors are made, where the model is an encoder."""


@dataclass(frozen=True, slots=True)
class Row:
    """The members of an epoch, in pipeline order."""

    epoch: int
    workers: tuple[Worker, ...]
    names: tuple[str, ...]
    """Of their machines."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a member holds after it loaded a shard."""

    loaded_bytes: Natural
    """Weights that it did not have before."""
    holding: Holding
    """What the planner is to know of it."""


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign of life of a member."""

    worker: Worker
    epoch: Natural
    process_id: Natural
    """On its machine."""
    is_computing: bool
    """Whether it computes now, and does not wait for others."""
    computed_s: Seconds
    """Time that it computed since it was started."""
    at_s: Seconds
    """When this was said, by a clock of its own that only grows."""
    resident_bytes: Natural
    cache_bytes: Natural


@dataclass(frozen=True, slots=True)
class Trouble:
    """A member cannot go on with the turns of an epoch."""

    epoch: int
    failure: ShareComputeError
    turn: int | None = None
    """The turn that it was at."""


ToServer = TurnResult | Trouble

HELD: Schema[Held] = Schema(Held)
SIGN: Schema[Sign] = Schema(Sign)


@dataclass(frozen=True, slots=True)
class _Trouble:
    """A `Trouble` on its way."""

    epoch: int
    failure: Raised
    turn: int | None


_TO_SERVER: Messages[TurnResult | _Trouble] = Messages(
    TurnResult=Schema(TurnResult), Trouble=Schema(_Trouble)
)


def pack_to_server(message: ToServer) -> bytes:
    """Return what a member tells the server as bytes."""
    if isinstance(message, TurnResult):
        return _TO_SERVER.pack("TurnResult", message)
    return _TO_SERVER.pack("Trouble", _Trouble(message.epoch, Raised.of(message.failure), message.turn))


def unpack_to_server(data: Any, sender: str) -> ToServer:
    """Return what a member told the server.

    Args:
        data: as it came.
        sender: name of its machine.

    Raises:
        Undeclared: it is no declared message.
    """
    message = _TO_SERVER.unpack(data, sender)
    if isinstance(message, TurnResult):
        return message
    return Trouble(message.epoch, message.failure.error(sender), message.turn)
