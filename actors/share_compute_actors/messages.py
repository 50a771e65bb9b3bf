"""Messages between members, the shard store and the coordinator of a training job, as immutable types."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from share_compute.device_kinds import DeviceKind
from share_compute.models.blueprint import Blueprint
from share_compute.models.objective import Objective
from share_compute.planning.cost.timings import LayerTiming
from share_compute.protocol.failures import InjectedFailure
from share_compute.protocol.membership import ShardPart, Worker
from share_compute.specification import TrainingSpec
from share_compute.specification.placement.operators import NO_STRATEGIES, OperatorsSpec
from share_compute.training.metrics import Predictions
from share_compute_actors.transport.traffic import NO_LIMITS, RateLimits
from share_compute_actors.wire import Natural, Schema, Seconds, StepNumber

FolderKind = Literal["checkpoint", "artifact", "contribution"]
"""A checkpoint, from which training resumes, an artifact with trained weights, or the contribution of a branch."""


class Updates(NamedTuple):
    """Changes of the weights by the latest committed steps, by step."""

    scales: Mapping[int, float]
    """Update factor of each step that the step log still has."""
    rates: Mapping[int, float]
    """Learning rate of each of these steps, if it depends on validations."""


@dataclass(frozen=True, slots=True)
class MemberSetup:
    """The parameters that a member is started with."""

    job: str
    worker: Worker
    """Id of the contributor that the member runs on. It identifies the member in the job."""
    name: str
    """Name of the member's machine, for display."""
    address: str
    """IP address at which the other members reach this member."""
    blueprint: Blueprint
    training: TrainingSpec
    """Training settings of the job. For a branch, the seed is that of the branch."""
    runs: tuple[int, ...]
    """Number of microbatches in each run of consecutive ids of the job's `SummationTree`."""
    threads: int
    device: DeviceKind
    gpus: tuple[str, ...]
    """UUIDs of the devices that the member must use, one for each rank; empty for CPUs, or if it is unknown."""
    deadline_s: float
    """Longest wait for another member, or for another rank of this one, in seconds."""
    applied: int
    """Number of the last step whose update the member's initial weights include; -1 if unknown."""
    version: int | None = None
    """Number of merges that the member's initial weights include; None if the member belongs to no branch."""
    tied: str | None = None
    """Stored name of the trained parameter that the first and the last stage share; None if there is none."""
    reads_full_batch: bool = False
    """Whether the member reads the samples of all microbatches of a step, also those of other members."""
    lent_bytes: int = 0
    """Main memory that the machine's owner lends, in bytes; 0 if unknown."""
    slices: int = 1
    """Number of slices of each sequence, which the members of a stage compute; 1 for whole sequences."""
    ranks: int = 1
    """Number of processes that compute the layers together, with the member itself."""
    lent_devices: int = 1
    """Number of devices that the machine's owner lends together. If there are several, each rank has its own."""
    operators: OperatorsSpec = NO_STRATEGIES
    """How these processes divide the operators of a layer."""
    limits: RateLimits = NO_LIMITS
    """Rates that the machine's owner allows for the transfers of all its members together."""
    failures: tuple[InjectedFailure, ...] = ()
    """Faults to inject, in tests."""

    @property
    def own_threads(self) -> int:
        """CPU threads of the member's own process: those of the first device, if ranks compute on several."""
        return max(1, self.threads // self.ranks) if self.lent_devices > 1 else self.threads

    @property
    def scope(self) -> str:
        """Id of the job, which is part of the envelope of each tensor that the member sends."""
        return self.job


class Source(NamedTuple):
    """An actor from which other actors load tensors."""

    actor: Any
    """A shard store or `ServedWeights` actor on the server, or a member."""
    name: str
    """Name of the actor's machine, for display."""
    worker: Worker | None
    """The member that the actor belongs to; None for an actor on the server."""
    shard: ShardPart | None = None
    """The part of the model of the backup copy to load from; None to load the actor's own tensors."""

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor with `with_shard` of the arguments; return the Ray reference to its answer."""
        return getattr(self.actor, method).remote(*self.with_shard(*arguments))

    def with_shard(self, *arguments: Any) -> tuple[Any, ...]:
        """Return ``arguments``, followed by ``shard`` unless it is None."""
        return arguments if self.shard is None else (*arguments, self.shard)


def server_source(actor: Any) -> Source:
    """Return the source for an actor on the server."""
    return Source(actor, "the server", None)


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of the parameters, buffers and optimizer state that a member loads."""

    all: tuple[Source, ...]
    places: Mapping[str, int] = field(default_factory=dict)
    """Index into `all` of each tensor's source, by stored name. Tensors without an entry come from the first source."""

    def place(self, name: str) -> int:
        """Return the index of the source that has this parameter or buffer."""
        return self.places.get(name, 0)


class Extent(NamedTuple):
    """A range of rows of one stored tensor."""

    name: str
    """Stored name of the tensor."""
    start: Natural
    stop: Natural | None
    """One past the last row; None for the rest of the tensor."""


_EXTENTS: Schema[tuple[Extent, ...]] = Schema(tuple[Extent, ...])


def pack_extents(extents: Sequence[Extent]) -> bytes:
    """Encode extents as bytes."""
    return _EXTENTS.pack(tuple(extents))


def read_extents(data: bytes) -> tuple[Extent, ...]:
    """Return the extents that `pack_extents` wrote.

    Raises:
        Undeclared: the data does not encode extents.
    """
    return _EXTENTS.unpack(data, "a member")


class Followed(NamedTuple):
    """A member whose shard another member backs up."""

    owner: Worker
    actor: Any
    """Actor of the owner."""
    shard: ShardPart
    """Layers of the owner's shard, and its share of the optimizer's state."""
    place: int = 0
    """Index of the backup member among all members that back up this owner."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Measurements of one member in one step."""

    targets: Natural
    """Number of targets of one microbatch; 0 outside the last stage."""
    seconds: Seconds
    waited_s: Seconds
    """The part of ``seconds`` in which the member ran neither a forward nor a backward pass."""
    layer_timings: Mapping[int, LayerTiming] | None = None
    """Mean times of each layer over the timed steps, by layer index; None if the timing did not end with this step."""


NUMBER = np.dtype("<f4")
"""Type of the numbers in `EvaluationResult`."""
MOST_CLASSES = 1 << 24


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Loss and predictions of one evaluation microbatch, as a member of the last stage reports them.

    Numbers are little-endian float32, which holds every class below `MOST_CLASSES` exactly.
    """

    loss_sum: float
    targets: Natural
    in_top_5: Natural = 0
    """Number of samples whose class is among those with the five highest outputs."""
    predicted: bytes = b""
    """Predicted class, or output of a regression, of each sample; empty for language models."""
    wanted: bytes = b""
    """Target of each sample; empty for language models."""
    scores: bytes = b""
    """All outputs for each sample; empty if they are too many, and for other tasks than classification."""

    def __post_init__(self) -> None:
        rows = NUMBER.itemsize * self.targets
        fits = len(self.predicted) == len(self.wanted) in (0, rows)
        if not fits or (self.scores and (not rows or len(self.scores) % rows)):
            raise ValueError("the numbers are not those of the targets")

    @property
    def score_width(self) -> int:
        """Number of outputs for each sample; 0 if they are not sent."""
        return len(self.scores) // (NUMBER.itemsize * self.targets) if self.scores else 0

    def fits(self, objective: Objective, targets: int) -> bool:
        """Return whether the numbers are possible for a task, with one for each sample.

        Scores may be infinite or NaN, because the loss can still be finite. Other numbers may be infinite or NaN only
        if the loss is, which then ends the job.

        Args:
            objective: task and loss.
            targets: number of targets of the microbatch.
        """
        if self.targets != targets or self.in_top_5 > targets:
            return False
        if objective.task == "language_model":
            return not self.predicted and not self.scores
        if bool(self.predicted) != bool(targets):
            return False
        numbers = np.frombuffer(self.predicted + self.wanted, NUMBER)
        if not objective.has_classes:
            return not self.scores and bool(np.isfinite(numbers).all() or not math.isfinite(self.loss_sum))
        classes = objective.classes or self.score_width or MOST_CLASSES
        widths = {0, self.score_width if objective.classes is None else objective.classes}
        if classes == 2 and objective.loss in ("bce", "hinge"):
            widths.add(1)
        are_classes = (numbers >= 0).all() and (numbers < classes).all() and (numbers % 1 == 0).all()
        return bool(are_classes) and self.score_width in widths

    def predictions(self) -> Predictions:
        """Return the predictions as arrays."""
        predicted, wanted, scores = (
            np.frombuffer(each, NUMBER) for each in (self.predicted, self.wanted, self.scores)
        )
        table = scores.reshape(self.targets, -1) if len(scores) else None
        return Predictions(self.loss_sum, self.targets, self.in_top_5, predicted, wanted, table)


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """Heartbeat of a training member."""

    worker: Worker
    step: StepNumber
    """Number of the last step whose update the weights include."""
    resident_bytes: Natural
    peak_resident_bytes: Natural
    reaches: StepNumber = 0
    """The last step that the member applied, or can apply without other members because its gradient is complete."""
    holds: ShardPart | None = None
    """Layers that the member computes with, and its share of the optimizer's state; None if it has no weights yet."""
    loaded: ShardPart | None = None
    """Layers that are loaded but not used yet, and the share loaded with them; None if there are none."""
    loaded_step: StepNumber = 0
    """Number of the last step whose update the ``loaded`` layers include."""
    sent_bytes: Natural = 0
    """Bytes of tensors that this process has sent."""
    received_bytes: Natural = 0
    """Bytes of tensors that this process has received."""
    unacknowledged: tuple[tuple[bytes, bytes], ...] = ()
    """Messages to the coordinator that this heartbeat repeats, each as (key, encoded message)."""
