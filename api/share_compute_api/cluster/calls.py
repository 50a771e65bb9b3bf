"""Messages between the control plane and the gateway: one JSON document per line."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from share_compute.files.strict import StrictModel

MOST_BYTES = 64 * 2**20
"""Longest line in either direction, in bytes."""

FailureKind: TypeAlias = Literal["raised", "mistake", "died", "unreachable", "no_answer"]
"""Kind of a failure:

- raised: a `ShareComputeError`;
- mistake: any other exception in the actor or the gateway;
- died: the process of the actor or of the gateway ended;
- unreachable: the actor cannot be reached now;
- no_answer: Ray itself failed, or no answer came in time."""


class HeadAddress(StrictModel):
    """First message to a gateway: the head runs, and the gateway can connect to it."""

    ray_address: str
    """Address of the GCS, as ``host:port``."""
    node_address: str
    """IP address of the head's node."""


class Call(StrictModel):
    """Request to run an operation of the gateway, or to cancel an earlier call."""

    number: int = Field(ge=0)
    """Number of the call; its answer has the same number."""
    operation: str
    """A method of `gateway_process.GatewayOperations`, or ``cancel``, which cancels the call with the given number."""
    arguments: list[Any] = Field(default_factory=list)


class CallFailure(StrictModel):
    """Reason why a call failed."""

    kind: FailureKind
    message: str
    code: str | None = None
    """Stable code of the error, if it is a `ShareComputeError`."""
    facts: dict[str, Any] = Field(default_factory=dict)
    """Facts of a `ShareComputeError`: hint, job, step, machine, details."""


class CallResult(StrictModel):
    """Result of a call: a value or a failure."""

    number: int
    value: Any = None
    failure: CallFailure | None = None


class NodeFacts(StrictModel):
    """One row of Ray's table of nodes."""

    node_id: str
    """Ray's id of the node, in hexadecimal."""
    address: str
    port: int
    """TCP port at which the node's raylet listens."""
    is_alive: bool
    labels: dict[str, str]
    resources: dict[str, float]
    """Resource name -> amount, for example ``CPU``, ``GPU``, and ``memory`` in bytes."""

    @property
    def is_head(self) -> bool:
        """Whether this is the Ray head's node."""
        return "node:__internal_head__" in self.resources


nodes_answer: TypeAdapter[list[NodeFacts]] = TypeAdapter(list[NodeFacts])
members_answer: TypeAdapter[dict[str, list[str]]] = TypeAdapter(dict[str, list[str]])
