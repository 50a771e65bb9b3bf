"""What the control plane and the gateway say to each other: one JSON document a line."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from share_compute.strict import StrictModel

MOST_BYTES = 64 * 2**20
"""Longest line in either direction."""

FailureKind: TypeAlias = Literal["raised", "mistake", "died", "unreachable", "no_answer"]
"""An error of ours; another exception of the actor; its process ended; it cannot be reached now; Ray itself failed."""


class Call(StrictModel):
    """Ask the gateway for something, or give up an earlier call."""

    number: int = Field(ge=0)
    """Of the call; the answer carries it, too."""
    operation: str
    """A method of `gateway_process.Operations`; ``cancel`` gives the call up."""
    arguments: list[Any] = Field(default_factory=list)


class CallFailure(StrictModel):
    """Why a call failed."""

    kind: FailureKind
    message: str
    code: str | None = None
    """Stable name of the error, if it is one of ours."""
    facts: dict[str, Any] = Field(default_factory=dict)
    """Of such an error: hint, job, step, machine, details."""


class Answer(StrictModel):
    """What became of a call."""

    number: int
    value: Any = None
    failure: CallFailure | None = None


class NodeFacts(StrictModel):
    """One row of Ray's table of nodes."""

    node_id: str
    """In hexadecimal."""
    address: str
    port: int
    """TCP port at which its raylet listens."""
    is_alive: bool
    labels: dict[str, str]
    resources: dict[str, float]
    """Such as ``CPU``, ``GPU`` and ``memory`` in bytes."""

    @property
    def is_head(self) -> bool:
        """Whether it is the node of the Ray head."""
        return "node:__internal_head__" in self.resources


nodes_answer: TypeAdapter[list[NodeFacts]] = TypeAdapter(list[NodeFacts])
members_answer: TypeAdapter[dict[str, list[str]]] = TypeAdapter(dict[str, list[str]])
