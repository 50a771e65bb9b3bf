"""Messages between the coordinator and the members. The receiver drops messages of other epochs.

Only a `Halt` of a later epoch is not dropped. The open step is the first step that is not committed.

The coordinator repeats a message to members that have not answered it, and a member then answers again.
`Rejected` is the only message that the member's state machine repeats without being asked. In a step without
failures and pauses, a member sends the coordinator only `Prepared`, and receives only `Commit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from share_compute.protocol.membership import Membership, Worker

Cargo = Literal["activation", "gradient", "tied", "log"]
"""Kind of tensor sent between members: an activation or a gradient over a stage boundary, the gradient sum of a
parameter that two stages share (tied), or a reduced gradient for a backup or catch-up replica (log)."""


class TensorLabel(NamedTuple):
    """Name of a tensor that one member sends to another. A tensor that is sent again keeps its name and values."""

    step: int
    cargo: Cargo
    microbatch: int
    stage: int
    """Stage that sent the tensor."""


@dataclass(frozen=True, slots=True)
class Halt:
    """Coordinator to member: stop the work of older epochs, and answer with a `Report`."""

    epoch: int
    committed: int
    """Last committed step. A member that has not applied this step, but holds its complete gradient, applies
    it before it reports."""
    scale: float = 1.0
    """Gradient factor of the last committed step, as in `Commit`."""
    generation: int = 0
    """Generation of the last committed step. A gradient of another generation is not applied."""


@dataclass(frozen=True, slots=True)
class Report:
    """Member to coordinator: what the member holds after it halted."""

    epoch: int
    worker: Worker
    applied: int
    """Last step whose update the weights contain."""
    step: int = 0
    """Open step that the following fields describe."""
    summed: frozenset[int] = frozenset()
    """Microbatches whose gradients the member holds, added in the order of the `SummationTree`."""
    forwarded: frozenset[int] = frozenset()
    """Microbatches that the member has run forward and can run backward."""
    activations: frozenset[int] = frozenset()
    """Microbatches whose output the member keeps for the next stage."""
    gradients: frozenset[int] = frozenset()
    """Microbatches whose input gradient the member keeps for the previous stage."""
    is_reduced: bool = False
    """Whether the member holds the gradient of its shard, summed over all microbatches."""
    generation: int = 0
    """Generation of the open step, as in `Form`. Results of an earlier generation do not count."""


@dataclass(frozen=True, slots=True)
class Form:
    """Coordinator to member: the next epoch begins."""

    membership: Membership
    keeps_step: bool = True
    """Whether results of the open step that members hold still count. False after shards have changed."""
    pauses: bool = False
    """Whether the open step waits for `Proceed`."""
    generation: int = 0
    """Number of restarts of the open step because its numbers were in doubt. Members discard results of an earlier
    generation. In a restarted step, members check that each cell's result is finite."""

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
    """Member to coordinator: the member and all holders of a copy of its shard have the step's reduced gradient."""

    epoch: int
    worker: Worker
    step: int
    squared_norms: Mapping[str, float] = field(default_factory=dict)
    """Squared norm of each parameter's gradient, without the loss scale, by stored name. The norm does not
    depend on the split into stages."""
    losses: Mapping[int, float] = field(default_factory=dict)
    """Loss of each microbatch, summed over its targets; empty except at members of the last stage."""
    digest: str = ""
    """Digest of the reduced gradient; empty if it will not be compared. The digests of all members of a stage
    must be equal."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Member to coordinator: the member cannot continue in this epoch.

    Its reduction ended without a result, or a tensor that was sent to it was lost or damaged.
    """

    epoch: int
    worker: Worker


@dataclass(frozen=True, slots=True)
class Rejected:
    """Member to coordinator: a tensor is not finite, or has a shape or dtype that the model does not produce.

    The member does not use the tensor. If the tensor is the result of the member's own cell, ``source`` is
    the member itself.
    """

    epoch: int
    worker: Worker
    source: Worker
    """Member that computed the tensor."""
    label: TensorLabel
    what: str
    """Defect of the tensor, as text for people."""
    is_certain: bool = True
    """Whether only a broken machine can produce such a tensor.

    False for a tensor that is not finite, because a diverging model produces such tensors on any machine. Another
    machine then recomputes the cell before the source is blamed.
    """


@dataclass(frozen=True, slots=True)
class Commit:
    """Coordinator to member: the step log has the step, so apply its update."""

    epoch: int
    step: int
    scale: float = 1.0
    """Factor by which the gradient is multiplied before the update: below 1 to clip it; 0 if the step must
    change no weights."""
    pauses: bool = False
    """Whether the next step waits for `Proceed`."""


@dataclass(frozen=True, slots=True)
class Proceed:
    """Coordinator to member: the pause before this step is over, so begin the step."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class Applied:
    """Member to coordinator: the weights contain the update of the step, and the member pauses.

    A member that does not pause sends no message about its update: its `Prepared` for the next step implies it.
    """

    epoch: int
    worker: Worker
    step: int


ToMember = Halt | Form | Commit | Proceed
ToCoordinator = Report | Formed | Prepared | Broken | Rejected | Applied
