"""Events and effects of a member's state machine, apart from messages.

The driver of the state machine carries out effects, and passes events to it. A cell is the forward or the backward of
one microbatch in one stage. The open step is the first step that is not committed. A backup and a catch-up replica are
members that hold a copy of another member's state.
"""

from __future__ import annotations

from dataclasses import dataclass

from share_compute.protocol.membership import Worker
from share_compute.protocol.messages import Commit, Form, Halt, Proceed, TensorLabel, ToCoordinator
from share_compute.protocol.schedule import Action

# -- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrived:
    """A tensor arrived from another member."""

    epoch: int
    label: TensorLabel


@dataclass(frozen=True, slots=True)
class Misfit:
    """A tensor arrived that is unexpected, has a wrong shape or dtype, or is not finite. The driver has dropped it."""

    epoch: int
    source: Worker
    label: TensorLabel
    what: str
    """Human-readable description of the tensor's defect."""
    is_certain: bool
    """False if the only defect is that the tensor is not finite."""


@dataclass(frozen=True, slots=True)
class Missed:
    """A tensor for this member was lost or damaged in transit."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """Weights were loaded into this member while it was halted. They contain the updates up to step ``applied``."""

    epoch: int
    applied: int


@dataclass(frozen=True, slots=True)
class Computed:
    """The cell is done; its output, if any, is ready to be sent."""

    action: Action
    is_finite: bool = True
    """False if `Compute.is_checked` requested the check, and a number of the result is not finite."""


@dataclass(frozen=True, slots=True)
class ComputeFailed:
    """A cell ended without a result, because another member that computes slices of the same sequences was lost."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """This member holds the complete gradient of its stage, or its share of it."""


@dataclass(frozen=True, slots=True)
class ReduceFailed:
    """The reduction ended without a result."""

    is_spoilt: bool = True
    """Whether the sums of this member's own microbatches are unusable."""


@dataclass(frozen=True, slots=True)
class Logged:
    """A backup member or catch-up replica acknowledged this member's reduced gradient."""

    epoch: int
    step: int
    place: int
    """Position of the backup member or catch-up replica in `Membership.copy_holders`."""


@dataclass(frozen=True, slots=True)
class Updated:
    """The weights contain the update of this step."""

    step: int


@dataclass(frozen=True, slots=True)
class Gathered:
    """All weights of this member contain the updates of the last applied step."""


@dataclass(frozen=True, slots=True)
class GatherFailed:
    """The exchange of updated weights ended without a result. Weights of other shares may lack an update."""


@dataclass(frozen=True, slots=True)
class RetransmissionTimeout:
    """Periodic event, upon which rejections and unacknowledged gradients are sent again."""


Event = (
    Halt
    | Form
    | Commit
    | Proceed
    | Arrived
    | Misfit
    | Missed
    | Loaded
    | Computed
    | ComputeFailed
    | Reduced
    | ReduceFailed
    | Logged
    | Updated
    | Gathered
    | GatherFailed
    | RetransmissionTimeout
)

# -- effects -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a cell, or the cells of all slices that the member has of the same part of a batch."""

    step: int
    action: Action
    adds: bool
    """Whether the microbatch's backward adds to the gradient of the step."""
    has_backward: bool
    """Whether this member also runs the backward of the microbatch."""
    is_last: bool
    """Whether this is the member's last cell of the step, and a backward that adds to the gradient. The driver may
    then reduce gradients while the cell runs."""
    is_checked: bool = False
    """Whether to check that the result is finite."""
    slices: tuple[int, ...] = ()
    """Ids of all microbatches of the cells, if microbatches are slices of sequences; ``action`` names the first."""

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Ids of the microbatches of the cells."""
        return self.slices or (self.action.microbatch,)


@dataclass(frozen=True, slots=True)
class Send:
    """Send a tensor to another member, and keep it until `Apply` or `Discard`."""

    label: TensorLabel
    target: Worker


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sum the gradients of the stage's members, or copy the sum from ``source`` if that is not None."""

    step: int
    source: Worker | None = None


@dataclass(frozen=True, slots=True)
class Log:
    """Send the reduced gradient, or the member's share of it, to a member that holds a copy of this member's state."""

    step: int
    holder: Worker
    place: int
    """Position of the receiver in `Membership.copy_holders`."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Update the weights with the reduced gradient times ``scale``, then discard the step's tensors.

    A member with a share of the optimizer's state updates only the weights of its share.
    """

    step: int
    scale: float
    rate: float | None = None
    """Learning rate; None if it follows from the step alone."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Exchange the updated weights with the stage's other members, each of which updated its share."""


@dataclass(frozen=True, slots=True)
class Discard:
    """Discard all results of the open step; the weights stay."""


@dataclass(frozen=True, slots=True)
class SendToCoordinator:
    """Send a message to the coordinator. The driver adds norms, losses and digest to `Prepared`."""

    message: ToCoordinator


Effect = Compute | Send | Reduce | Log | Apply | Gather | Discard | SendToCoordinator
