"""Messages between the server of a deployment and its members. Engine steps are defined elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from share_compute.device_kinds import DeviceKind
from share_compute.errors import ShareComputeError
from share_compute.inference.placement import Holding
from share_compute.inference.scheduler.engine_steps import StepResult
from share_compute.models.blueprint import Blueprint
from share_compute.models.huggingface.encoder_types import Pooling
from share_compute.protocol.membership import Worker
from share_compute.specification import ServedPrecision
from share_compute_actors.wire import Messages, Natural, Raised, Schema, Seconds


@dataclass(frozen=True, slots=True)
class ServingCase:
    """An engine step that a member measures, with one token of each sequence."""

    sequences: int
    past_tokens: int
    """Number of earlier tokens of each sequence."""


@dataclass(frozen=True, slots=True)
class ServingSetup:
    """The parameters that a member is started with."""

    deployment: str
    """Id of the replica of the deployment; tensors with another id are dropped."""
    worker: Worker
    """Id of the contributor that the member runs on. It identifies the member in the replica."""
    name: str
    """Name of the member's machine, for display."""
    address: str
    """IP address at which the other members reach this member."""
    blueprint: Blueprint
    dtype: ServedPrecision
    """Type of weights and hidden states. With int8, everything except the quantized weights is float32."""
    window_tokens: int
    """Longest sequence, prompt and answer together, in tokens."""
    threads: int
    device: DeviceKind
    gpus: tuple[str, ...]
    """UUIDs of the devices that the member must use, one for each rank; empty for CPUs, or if it is unknown."""
    pooling: Pooling | None = None
    """Pooling of token vectors into one vector, if the model is an encoder; otherwise None."""
    ranks: int = 1
    """Number of processes that compute the member's layers together."""
    lent_devices: int = 1
    """Number of devices that the machine's owner lends together. If there are several, each rank has its own."""
    measured: ServingCase = ServingCase(1, 1)
    """Engine step with which compiled and eager code are compared."""

    @property
    def own_threads(self) -> int:
        """CPU threads of the member's own process: those of the first device if ranks compute on several devices."""
        return max(1, self.threads // self.ranks) if self.lent_devices > 1 else self.threads

    @property
    def scope(self) -> str:
        """Id of the replica, which is part of the envelope of each tensor that the member sends."""
        return self.deployment


@dataclass(frozen=True, slots=True)
class Row:
    """The members of an epoch, in pipeline order."""

    epoch: int
    workers: tuple[Worker, ...]
    names: tuple[str, ...]
    """Names of the members' machines, in the order of ``workers``."""


@dataclass(frozen=True, slots=True)
class Held:
    """The state of a member after it loaded a shard."""

    loaded_bytes: Natural
    """Total size of the tensors that the member loaded, without tensors that it already had."""
    holding: Holding
    """The member's memory use, from which the server computes the scheduler's limits."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat of a member."""

    worker: Worker
    epoch: Natural
    process_id: Natural
    """Id of the member's process on its machine."""
    is_computing: bool
    """Whether the member computes an engine step now; false while it waits for inputs."""
    computed_s: Seconds
    """Total compute time since the member started, in seconds."""
    at_s: Seconds
    """Time of this heartbeat, by the member's own monotonic clock."""
    resident_bytes: Natural
    cache_bytes: Natural


@dataclass(frozen=True, slots=True)
class Trouble:
    """A member's report that it cannot continue the engine steps of an epoch."""

    epoch: int
    failure: ShareComputeError
    step: int | None = None
    """Id of the engine step that failed; None if unknown."""


ToServer = StepResult | Trouble

HELD: Schema[Held] = Schema(Held)
HEARTBEAT: Schema[Heartbeat] = Schema(Heartbeat)
LAST_EPOCH: Schema[Natural | None] = Schema(Natural | None)
"""Schema of the answer of `ServingMember.follow`."""


@dataclass(frozen=True, slots=True)
class _Trouble:
    """A `Trouble` in the form in which it is sent."""

    epoch: int
    failure: Raised
    step: int | None


_TO_SERVER: Messages[StepResult | _Trouble] = Messages(
    StepResult=Schema(StepResult), Trouble=Schema(_Trouble)
)


def pack_to_server(message: ToServer) -> bytes:
    """Encode a member's message to the server as bytes."""
    if isinstance(message, StepResult):
        return _TO_SERVER.pack("StepResult", message)
    return _TO_SERVER.pack("Trouble", _Trouble(message.epoch, Raised.of(message.failure), message.step))


def unpack_to_server(data: Any, sender: str) -> ToServer:
    """Decode a member's message to the server.

    Args:
        data: the message as it was received.
        sender: name of the member's machine.

    Raises:
        Undeclared: the data encodes no message that a member may send.
    """
    message = _TO_SERVER.unpack(data, sender)
    if isinstance(message, StepResult):
        return message
    return Trouble(message.epoch, message.failure.error(sender), message.step)
