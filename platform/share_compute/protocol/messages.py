"""What the coordinator and the members tell each other. Who gets a message of another epoch drops it.

Only the coordinator says things again: whoever hears something twice answers again. In a step without failures each
member is told `Commit` and tells `Prepared`, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from share_compute.protocol.roster import Roster, Worker

Cargo = Literal["activation", "gradient", "tied", "log"]
"""What travels between members: over a boundary; of a parameter that two pools share; to a buddy."""


class Label(NamedTuple):
    """Names one tensor on its way between members: all that have this name are equal."""

    step: int
    cargo: Cargo
    microbatch: int
    pool: int
    """Pool that sent it."""


@dataclass(frozen=True, slots=True)
class Halt:
    """Coordinator to member: stop what you do in older epochs, and report what you have."""

    epoch: int
    committed: int
    """Last committed step. A member that holds its reduced gradient applies it before it reports."""
    scale: float = 1.0
    """Of that step, as `Commit` says it."""
    generation: int = 0
    """Of that step: a gradient of an earlier generation is not applied."""


@dataclass(frozen=True, slots=True)
class Report:
    """Member to coordinator: what it holds, after it halted."""

    epoch: int
    worker: Worker
    applied: int
    """Last step whose update its weights have."""
    step: int = 0
    """Open step that the rest speaks of."""
    summed: frozenset[int] = frozenset()
    """Microbatches whose gradients it holds, added up in the tree's order."""
    forwarded: frozenset[int] = frozenset()
    """Microbatches that it has run forward, and can run backward."""
    activations: frozenset[int] = frozenset()
    """Microbatches whose output it keeps for the pool behind."""
    gradients: frozenset[int] = frozenset()
    """Microbatches whose gradient it keeps for the pool before."""
    is_reduced: bool = False
    """Whether it holds the sum over all microbatches."""
    generation: int = 0
    """Of the open step, as `Form` says it: what belongs to an earlier one does not count."""


@dataclass(frozen=True, slots=True)
class Form:
    """Coordinator to member: the next epoch begins."""

    roster: Roster
    keeps_step: bool = True
    """Whether what is done of the open step still counts; not after shards have changed."""
    pauses: bool = False
    """Whether the open step waits for `Proceed`."""
    generation: int = 0
    """Times that the open step was started over because its numbers were in doubt. Members that hold something of an
    earlier generation discard it. In a step that was started over, members check each cell's result."""

    @property
    def epoch(self) -> int:
        """Epoch that begins."""
        return self.roster.epoch


@dataclass(frozen=True, slots=True)
class Formed:
    """Member to coordinator: it has begun the epoch."""

    epoch: int
    worker: Worker


@dataclass(frozen=True, slots=True)
class Prepared:
    """Member to coordinator: it holds the reduced gradient of the step, and so do all that keep a copy of its shard."""

    epoch: int
    worker: Worker
    step: int
    squared_norms: Mapping[str, float] = field(default_factory=dict)
    """Of the gradient of each parameter: summed in one order for all, whatever the pools."""
    losses: Mapping[int, float] = field(default_factory=dict)
    """By microbatch; the last pool knows them."""
    digest: str = ""
    """Of the reduced gradient: members of a pool must agree."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Member to coordinator: only another epoch lets it go on.

    Its reduction ended without result, or a tensor for it was lost on its way.
    """

    epoch: int
    worker: Worker


@dataclass(frozen=True, slots=True)
class Rejected:
    """Member to coordinator: a tensor is not what the blueprint says. The member does not use it.

    A member may reject the result of its own cell: then it is the source itself.
    """

    epoch: int
    worker: Worker
    source: Worker
    """Member that computed the tensor."""
    label: Label
    what: str
    """The defect of the tensor, for people."""
    is_certain: bool = True
    """Whether only a broken machine makes such a tensor. False where it is not finite: a model that diverges makes such
    tensors on any machine, so another one computes the cell before its source is blamed."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Coordinator to member: the step is recorded; apply it."""

    epoch: int
    step: int
    scale: float = 1.0
    """What the gradient is multiplied by first, to clip it."""
    pauses: bool = False
    """Whether the next step waits for `Proceed`."""


@dataclass(frozen=True, slots=True)
class Proceed:
    """Coordinator to member: begin this step."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class Applied:
    """Member to coordinator: its weights have the update of the step, and it pauses.

    Nobody is told of an update after which a member goes on: that it prepares the next step says it.
    """

    epoch: int
    worker: Worker
    step: int


ToMember = Halt | Form | Commit | Proceed
ToCoordinator = Report | Formed | Prepared | Broken | Rejected | Applied
