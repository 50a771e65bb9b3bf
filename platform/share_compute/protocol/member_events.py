"""What a member's machine takes in and gives out, beside messages."""

from __future__ import annotations

from dataclasses import dataclass

from share_compute.protocol.messages import Commit, Form, Halt, Label, Proceed, ToCoordinator
from share_compute.protocol.roster import Worker
from share_compute.training.schedule import Action

# -- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrived:
    """A tensor came from another member, and is kept for the cell that needs it."""

    epoch: int
    label: Label


@dataclass(frozen=True, slots=True)
class Misfit:
    """A tensor came whole from another member, and is not what the blueprint says; it was dropped."""

    epoch: int
    source: Worker
    label: Label
    what: str
    """The defect of the tensor, for people."""
    is_certain: bool
    """False where it is only not finite."""


@dataclass(frozen=True, slots=True)
class Missed:
    """A tensor that another member sent here was lost, or damaged on its way: only another epoch brings it."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The weights were brought to this member while it was halted: they have the updates up to this step."""

    epoch: int
    applied: int


@dataclass(frozen=True, slots=True)
class Computed:
    """The cell is done; its output, if any, is there to be sent."""

    action: Action
    is_finite: bool = True
    """False where it was to be checked, and some of its result is not finite."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """The pool's gradient is complete here."""


@dataclass(frozen=True, slots=True)
class ReduceFailed:
    """The reduction ended without result."""

    is_spoilt: bool = True
    """Whether the sums that went in are gone; not where some member never came, so that nothing was exchanged."""


@dataclass(frozen=True, slots=True)
class Logged:
    """One of those that keep a copy has the reduced gradient."""

    epoch: int
    step: int
    place: int
    """Its place among them."""


@dataclass(frozen=True, slots=True)
class Updated:
    """The weights have the update of this step."""

    step: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Who keeps a copy has not answered in the time that a gradient takes: give it once more."""


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
    | Reduced
    | ReduceFailed
    | Logged
    | Updated
    | Tick
)

# -- effects -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a cell."""

    step: int
    action: Action
    adds: bool
    """Whether its backward adds to the gradient."""
    has_backward: bool
    """Whether its backward is run, too; a forward without one need not keep what that would need."""
    is_last: bool
    """Whether nothing is left to be added afterwards: reductions may start inside."""
    is_checked: bool = False
    """Whether it must be found out if the result is finite."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a tensor that is kept until the step is committed."""

    label: Label
    target: Worker


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sum the gradients of the pool's members, or copy the sum from the one that has it."""

    step: int
    source: Worker | None = None


@dataclass(frozen=True, slots=True)
class Log:
    """Give the reduced gradient to one that keeps a copy of what this member holds."""

    step: int
    keeper: Worker
    place: int
    """Its place among all that do."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Update the weights with the reduced gradient times ``scale``, then forget the step's tensors."""

    step: int
    scale: float


@dataclass(frozen=True, slots=True)
class Discard:
    """Forget everything of the open step but the weights."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the coordinator. The one who carries it out adds to `Prepared` what the machine does not know."""

    message: ToCoordinator


Effect = Compute | Send | Reduce | Log | Apply | Discard | Tell
