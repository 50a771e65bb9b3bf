"""Messages between the coordinator and the members.

The receiver drops messages of other epochs, except a `Halt` of a later epoch. The coordinator repeats a message to
members that have not answered it.

The open step is the first step that is not committed. A backup and a catch-up replica are members that hold a copy of
another member's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from share_compute.protocol.membership import Membership, Worker

Cargo = Literal["activation", "gradient", "tied", "log"]
"""Kind of a tensor that one member sends to another.

- activation, gradient: output of a forward or a backward, for the adjacent stage.
- tied: gradient sum of a parameter that the first and the last stage share.
- log: reduced gradient for a backup or a catch-up replica.
"""


class TensorLabel(NamedTuple):
    """Name of a tensor that one member sends to another."""

    step: int
    cargo: Cargo
    microbatch: int
    stage: int
    """Index of the stage that sent the tensor."""


@dataclass(frozen=True, slots=True)
class Halt:
    """Coordinator to member: stop the work of earlier epochs, and answer with a `Report`."""

    epoch: int
    committed: int
    """Last committed step. A member that has not applied this step, but holds its complete gradient, applies it
    before it answers."""
    scale: float = 1.0
    """Gradient factor of the last committed step, as in `Commit`."""
    generation: int = 0
    """Generation of the last committed step. A gradient of another generation is not applied."""
    rate: float | None = None
    """Learning rate of the last committed step, as in `Commit`."""


@dataclass(frozen=True, slots=True)
class Report:
    """Member to coordinator: the member has halted, and holds these results."""

    epoch: int
    worker: Worker
    applied: int
    """Last step whose update the weights contain."""
    step: int = 0
    """Open step that the following fields describe."""
    summed: frozenset[int] = frozenset()
    """Microbatches whose gradients are in the sums that the member holds."""
    forwarded: frozenset[int] = frozenset()
    """Microbatches that the member has run forward and can run backward."""
    activations: frozenset[int] = frozenset()
    """Microbatches whose output the member keeps for the next stage."""
    gradients: frozenset[int] = frozenset()
    """Microbatches whose input gradient the member keeps for the previous stage."""
    is_reduced: bool = False
    """Whether the member holds the gradient of its layers, or its share of it, summed over all microbatches."""
    generation: int = 0
    """Generation of the step that the report describes; see `Form.generation`."""


@dataclass(frozen=True, slots=True)
class Form:
    """Coordinator to member: the next epoch begins."""

    membership: Membership
    keeps_step: bool = True
    """Whether members keep their results of the open step; if false, they discard them."""
    pauses: bool = False
    """Whether the open step waits for `Proceed`."""
    generation: int = 0
    """Number that grows each time that the open step is restarted because its numbers are in doubt. Members discard
    results of an earlier generation."""

    @property
    def epoch(self) -> int:
        """Epoch that begins."""
        return self.membership.epoch


@dataclass(frozen=True, slots=True)
class Formed:
    """Member to coordinator: the member has begun the epoch."""

    epoch: int
    worker: Worker


@dataclass(frozen=True, slots=True)
class Prepared:
    """Member to coordinator: the member and all holders of a copy of its state have the step's reduced gradient."""

    epoch: int
    worker: Worker
    step: int
    squared_norms: Mapping[str, float] = field(default_factory=dict)
    """Squared norm of each parameter's gradient, by the parameter's name. The loss scale is divided out.

    A member with a share of the optimizer's state sends the norms of its share."""
    losses: Mapping[int, float] = field(default_factory=dict)
    """Loss of each microbatch, summed over its targets; empty except at members of the last stage."""
    digest: str = ""
    """Digest of the reduced gradient, for comparison with other members of the stage; empty if none is needed.

    Members with different shares of the gradient send none."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Member to coordinator: the member cannot continue in this epoch.

    Its reduction or its exchange of weights ended without a result, or a tensor for it was lost or damaged.
    """

    epoch: int
    worker: Worker


@dataclass(frozen=True, slots=True)
class Rejected:
    """Member to coordinator: a tensor is unexpected, has a wrong shape or dtype, or is not finite.

    The member does not use the tensor.
    """

    epoch: int
    worker: Worker
    source: Worker
    """Member that computed or sent the tensor; may be the reporting member."""
    label: TensorLabel
    what: str
    """Human-readable description of the tensor's defect."""
    is_certain: bool = True
    """Whether the tensor proves a fault. False for a tensor that is not finite, because the model may diverge."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Coordinator to member: the step is committed, so apply its update."""

    epoch: int
    step: int
    scale: float = 1.0
    """Factor by which the gradient is multiplied before the update; 0 if the step must change no weights."""
    pauses: bool = False
    """Whether the next step waits for `Proceed`."""
    rate: float | None = None
    """Learning rate, if it depends on validations; None if it follows from the step alone."""


@dataclass(frozen=True, slots=True)
class Proceed:
    """Coordinator to member: the pause before this step is over, so begin the step."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class Applied:
    """Member to coordinator: the weights contain the update of the step, and the member pauses."""

    epoch: int
    worker: Worker
    step: int


ToMember = Halt | Form | Commit | Proceed
ToCoordinator = Report | Formed | Prepared | Broken | Rejected | Applied
