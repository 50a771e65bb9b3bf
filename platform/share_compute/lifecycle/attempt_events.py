"""Messages between the control plane and an attempt (one execution of a job)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from share_compute.files.strict import StrictModel
from share_compute.lifecycle.computation import Computation
from share_compute.planning.cost.timings import MachineTimings
from share_compute.planning.plan import Plan
from share_compute.protocol.failures import InjectedFailure
from share_compute.specification import SparseJob, TrainJob
from share_compute.specification.task import METRICS_BESIDE_LOSS
from share_compute.topology import Topology


class BranchAssignment(StrictModel):
    """Part of an assignment that makes an attempt one branch of a job whose branches merge in rounds."""

    number: int = Field(ge=0)
    """Number of the branch, from 0."""
    version: int = Field(ge=0)
    """Number of merges that the weights include with which the attempt begins."""
    start: int = Field(ge=1)
    """Number of the start of the branch; reports of earlier starts are ignored."""
    step: int | None = Field(default=None, ge=0)
    """Number of steps that the branch has taken; None: as many as its checkpoint says."""
    data: Path
    """Folder with the prepared data, which all branches of the job share."""


class Assignment(StrictModel):
    """Input of a coordinator for one attempt at a job."""

    job_id: str
    attempt: int
    spec: TrainJob
    topology: Topology
    """Contributors that this attempt may use, and their links."""
    epoch: int = 0
    folder: Path
    """Folder of the job on the server, with prepared data, checkpoints and artifacts."""
    checkpoint: Path | None = None
    """Folder of the checkpoint to continue from; None if there is none."""
    known_step: int = 0
    """Last committed step that the control plane knows; the attempt reports later committed steps before it trains."""
    drift: float = Field(default=0.25, gt=0)
    """Fraction by which measured step times may differ from predicted ones before the job is replanned."""
    checkpoint_every_s: float | None = Field(default=None, gt=0)
    """Seconds between checkpoints, from the server's settings; None for no checkpoints by time."""
    timings: dict[str, MachineTimings] = Field(default_factory=dict)
    """Layer times that earlier attempts measured, by contributor id."""
    failures: tuple[InjectedFailure, ...] = ()
    """Faults to inject at named points of the protocol; used only by tests."""
    branch: BranchAssignment | None = None
    """Branch of the job that this attempt trains; None if the attempt is for the whole job."""
    has_run: bool = False
    """Whether an earlier attempt carried out a plan. A pinned plan is then used only if it still can be carried out."""

    @property
    def timed_checkpoints_s(self) -> float | None:
        """Return ``checkpoint_every_s``, or None if the job has ``training.checkpoint_every``."""
        return self.checkpoint_every_s if self.spec.training.checkpoint_every is None else None


class SparseAssignment(StrictModel):
    """Input of a coordinator for one attempt at a job that trains a sparse model."""

    job_id: str
    attempt: int
    spec: SparseJob
    topology: Topology
    """Contributors that this attempt may use, and their links."""
    folder: Path
    """Folder of the job on the server, with prepared data, checkpoints and artifacts."""
    checkpoint_every_s: float | None = Field(default=None, gt=0)
    """Seconds between checkpoints, from the server's settings; None for none."""


class Offer(StrictModel):
    """Machines that a running attempt may use from now on; replaces the earlier offer.

    With a `ReplanProposed`, the attempt requests machines that it does not hold. It starts nothing on these machines
    until the request is answered.
    """

    topology: Topology
    """Machines that the attempt holds, and free ones that are offered to no other job."""
    answers: int | None = None
    """Step of the `ReplanProposed` that this offer answers; None if it answers none.

    An offer that answers a proposal leases to the attempt those proposed machines that are in ``topology``.
    """


class Planned(StrictModel):
    """Report of the plan with which an attempt starts or takes over its members."""

    type: Literal["planned"] = "planned"
    plan: Plan


class RangesPlaced(StrictModel):
    """Report of the machines on which the workers and servers of a sparse model run; other machines are released."""

    type: Literal["ranges-placed"] = "ranges-placed"
    machines: tuple[str, ...]
    """Ids of contributors."""
    sentence: str
    """Human-readable description."""


class Reformed(StrictModel):
    """Report of a membership change: training continues in a new epoch with a new plan."""

    type: Literal["reformed"] = "reformed"
    epoch: int
    step: int
    """The uncommitted step with which the epoch begins."""
    plan: Plan
    """Placement of the layers on the members in the new epoch."""
    lost: tuple[str, ...] = ()
    """Ids of contributors that died, were unresponsive or were expelled."""
    joined: tuple[str, ...] = ()
    """Ids of contributors that hold a part of the model from now on."""
    left: tuple[str, ...] = ()
    """Ids of contributors that handed over their shards and no longer hold a part of the model."""
    expected: tuple[str, ...] = ()
    """Ids of contributors that are still joining for the last proposed plan; they stay leased to the job."""
    seconds: float = Field(ge=0)
    """Time in which no step was computed."""
    recomputed: int = Field(ge=0)
    """Number of microbatches of the uncommitted step that had to be computed again."""
    sentence: str
    """Human-readable cause of the change."""


class Started(StrictModel):
    """Report that all members hold their shards and the first step begins."""

    type: Literal["started"] = "started"
    first_step: int
    total_steps: int


class ComputationChosen(Computation):
    """Report whether the job computes with compiled or with eager code, for a job with ``training.compile``."""

    type: Literal["computation"] = "computation"


class StepCommitted(StrictModel):
    """Report that one optimizer step is committed."""

    type: Literal["step"] = "step"
    step: int
    """Number of the step, from 1."""
    loss: float
    learning_rate: float
    gradient_norm: float | None
    samples: int
    tokens: int
    """Number of predicted tokens in the step; for a classifier, the number of samples."""
    seconds: float
    tokens_per_s: float
    """Mean number of tokens per second over the last steps."""
    tasks: dict[str, float] | None = None
    """Loss of each task, without its weight, as ``digit.loss``; None without several tasks."""


class Validated(StrictModel):
    """Report of the loss and the metrics on samples that are not trained on."""

    type: Literal["validated"] = "validated"
    split: Literal["validation", "test"]
    step: int
    loss: float
    accuracy: float | None = None
    """Fraction of correctly predicted classes, for a classifier."""
    top_5_accuracy: float | None = None
    """Fraction of samples whose class is among the five most likely, for a classifier of more than five classes."""
    f1: float | None = None
    """Mean over the classes of the harmonic mean of precision and recall (macro F1), for a classifier."""
    auroc: float | None = None
    """Area under the ROC curve; for more than two classes the mean of each class against the others."""
    rmse: float | None = None
    """Root mean square error in the unit of the target, for a regression."""
    mae: float | None = None
    """Mean absolute error in the unit of the target, for a regression."""
    r2: float | None = None
    """Coefficient of determination, for a regression: 1 is perfect, 0 is as good as the mean of the split."""

    perplexity: float | None = None
    """exp(loss), for a language model."""
    tasks: dict[str, float] | None = None
    """Metrics of each task, as ``digit.accuracy`` and ``digit.loss``; None without several tasks."""

    @classmethod
    def of(cls, split: Literal["validation", "test"], step: int, figures: Mapping[str, float]) -> Validated:
        """Return the report of a split's metrics; it includes the loss as ``validation_loss``."""
        named = {
            name.replace("validation_loss", "loss"): value for name, value in figures.items() if "." in name
        }
        others: dict[str, Any] = {
            name: value for name, value in figures.items() if "." not in name and name != "validation_loss"
        }
        return cls(split=split, step=step, loss=figures["validation_loss"], tasks=named or None, **others)

    def figures(self) -> dict[str, float]:
        """Return the metrics by name, without those of single tasks; the loss is called ``validation_loss``."""
        found = {name: getattr(self, name) for name in METRICS_BESIDE_LOSS}
        return {"validation_loss": self.loss, **{name: v for name, v in found.items() if v is not None}}


# As many as `share_compute.training.pictures` makes.
_MOST_CLASSES = 100
_MOST_POINTS = 1000
_ConfusionRow: TypeAlias = Annotated[tuple[int, ...], Field(max_length=_MOST_CLASSES)]
_ClassName: TypeAlias = Annotated[str, Field(max_length=80)]


class Pictured(StrictModel):
    """Report of the predictions for a whole split; it replaces the earlier one of this split, and is not in the log."""

    type: Literal["pictured"] = "pictured"
    task: str | None = None
    """Name of the task; None without several tasks."""
    split: Literal["validation", "test"]
    step: int
    samples: int
    """Number of samples in the split."""
    confusion: tuple[_ConfusionRow, ...] | None = Field(default=None, max_length=_MOST_CLASSES)
    """Number of samples by true class and predicted class, for a classifier of at most 100 classes."""
    classes: tuple[_ClassName, ...] | None = Field(default=None, max_length=_MOST_CLASSES)
    """Names of the classes, each of at most 80 characters; None if the classes are numbered from 0."""
    points: tuple[tuple[float, float], ...] | None = Field(default=None, max_length=_MOST_POINTS)
    """True and predicted value of at most 1,000 samples, for a regression."""


class TargetReached(StrictModel):
    """Report that a validation reached ``training.target``, which ends the job."""

    type: Literal["target-reached"] = "target-reached"
    step: int
    metric: str
    value: float
    """Value of the metric in this validation."""
    seconds: float = Field(ge=0)
    """Time since the attempt began its first step, validations included."""
    sent_bytes: int = Field(ge=0)
    """Bytes of tensors that the members have sent since the attempt began; with rounds, those of the first branch."""


class Sampled(StrictModel):
    """Report of a text with which the model continued a prompt, by greedy decoding."""

    type: Literal["sampled"] = "sampled"
    step: int
    """Step after which the text was generated."""
    prompt: str
    text: str
    """Generated text, without the prompt."""


class StageTiming(StrictModel):
    """Predicted and measured time of one stage."""

    predicted_busy_s: float | None
    """Seconds that the busiest member of the stage computes in a step; None if the plan has no prediction."""
    measured_busy_s: float


class Measured(StrictModel):
    """Reports measured step times together with the plan's predictions."""

    type: Literal["measured"] = "measured"
    step: int
    """Last measured step."""
    predicted_step_s: float | None
    """Predicted seconds of a step; None if the plan has no prediction."""
    measured_step_s: float
    """Median seconds of the last steps."""
    stages: tuple[StageTiming, ...]
    """Times of the stages, in pipeline order."""
    machines: dict[str, float] = Field(default_factory=dict)
    """Median seconds that each machine computes in a step, by contributor id; empty in events of older releases."""


class LayersTimed(StrictModel):
    """Report of measured layer times, for the next plans of the job."""

    type: Literal["layers-timed"] = "layers-timed"
    step: int
    """Last measured step."""
    machines: dict[str, MachineTimings]
    """New measurements, by contributor id."""


class ReplanProposed(StrictModel):
    """Proposal of another plan, which is applied once the machines of the new plan have joined."""

    type: Literal["replan-proposed"] = "replan-proposed"
    step: int
    """Step after which the plan was computed."""
    plan: Plan
    """The proposed plan."""
    current_step_s: float
    """Seconds of a step with the current plan, predicted from measured times."""
    gain_s: float
    """Seconds saved over the remaining steps; ``move_cost_s`` is not subtracted."""
    move_cost_s: float
    """Seconds to move the state to other machines, and to connect the members again."""
    sentence: str


class ReplanAbandoned(StrictModel):
    """Report that the last proposed plan is not applied. No member is left on machines that only that plan uses."""

    type: Literal["replan-abandoned"] = "replan-abandoned"
    reason: str


class Offended(StrictModel):
    """Report that a machine computed wrong numbers, or wrongly rejected a tensor."""

    type: Literal["offended"] = "offended"
    machine: str
    """Id of the contributor."""
    step: int
    what: str
    """Human-readable description of the error."""
    quarantined: bool
    """Whether this report alone puts the machine in quarantine; otherwise earlier reports count too."""
    accuser: str | None = None
    """Id of the contributor whose claim is the only evidence; None if the coordinator or the machine itself found the
    error."""
    sentence: str


class LinkCut(StrictModel):
    """Report that two machines of the job can no longer reach each other."""

    type: Literal["link-cut"] = "link-cut"
    machines: tuple[str, str]
    """Ids of the two contributors."""
    sentence: str


class Protection(StrictModel):
    """Report on whether the job can lose any one machine without losing a step.

    Each epoch starts unprotected.
    """

    type: Literal["protection"] = "protection"
    step: int
    """Last committed step."""
    is_protected: bool
    """Whether each layer is on at least two machines; complete backups count."""


class BranchRound(StrictModel):
    """One branch in one merge."""

    number: int
    """Number of the branch, from 0."""
    round: int
    """The round of the contribution; less than that of the merge if it was late."""
    machines: tuple[str, ...]
    """Ids of the contributors that trained the branch."""
    loss: float | None = None
    """Mean loss of the round's steps."""
    samples: int
    seconds: float = Field(ge=0)
    """Time that the steps took."""
    waited_s: float = Field(ge=0)
    """Time from the report of the contribution to the merge; 0 if the branch trains on meanwhile."""
    sent_bytes: int = Field(ge=0)
    """Size of the contribution."""


class RoundMerged(StrictModel):
    """Report that the contributions of branches are merged, and the merge is durable."""

    type: Literal["round"] = "round"
    round: int
    """Number of the merge, from 1."""
    step: int
    """Number of steps that each branch has taken, except those that are late."""
    branches: tuple[BranchRound, ...]
    """Branches whose contributions were merged, in the order of the sum."""
    missing: tuple[int, ...] = ()
    """Branches without a contribution to this round; empty if branches push one after another."""
    update_bytes: int = Field(ge=0)
    """Size of the update that each branch receives."""
    weight_bytes: int = Field(ge=0)
    """Size of the trained weights in float32, for comparison."""
    consensus_distance: float | None = Field(default=None, ge=0)
    """Root mean square distance of the branches' weights from the merged ones, relative to the latter's norm.

    None if all branches have the merged weights.
    """
    merge_s: float = Field(ge=0)
    """Time that the merge took."""

    @property
    def compression_ratio(self) -> float | None:
        """Float32 bytes of merged contributions and updates, divided by their actual bytes; None without any."""
        merged = len(self.branches)
        moved = sum(branch.sent_bytes for branch in self.branches) + merged * self.update_bytes
        return 2 * merged * self.weight_bytes / moved if moved else None


class LinkBytes(StrictModel):
    """Bytes that left and reached one machine."""

    sent_bytes: int = Field(ge=0)
    received_bytes: int = Field(ge=0)


class TrafficMeasured(StrictModel):
    """Report of the tensors that members exchanged with each other and with the server since the last such report.

    Members count the tensors that their process sends and receives. Samples and control messages are not counted.
    """

    type: Literal["traffic"] = "traffic"
    step: int
    """Last committed step; in rounds that of the branch whose members are reported."""
    machines: dict[str, LinkBytes]
    """Bytes by contributor id."""


class CheckpointSaved(StrictModel):
    """Report that a checkpoint, from which the job can be resumed, is on disk."""

    type: Literal["checkpoint"] = "checkpoint"
    step: int
    path: Path
    size_bytes: int


class ArtifactSaved(StrictModel):
    """Report that a finished result is on disk."""

    type: Literal["artifact"] = "artifact"
    name: str
    path: Path
    size_bytes: int


class RowsDone(StrictModel):
    """Report that rows of a batch are answered and durably stored."""

    type: Literal["rows"] = "rows"
    done: int = Field(ge=0)
    """Number of completed rows over all attempts."""
    total: int = Field(ge=0)
    failed: int = Field(ge=0)
    """Number of completed rows that have an error instead of an answer."""
    rows_per_s: float | None = None
    """Rate over the last rows; None before this attempt has completed rows."""
    tokens_per_s: float | None = None
    """Rate of generated tokens, or of read tokens for embeddings, over the last rows."""


class Note(StrictModel):
    """A line for the job's log."""

    type: Literal["note"] = "note"
    level: Literal["info", "warning", "error"] = "info"
    message: str


class AttemptEnded(StrictModel):
    """Report of the end of an attempt; always its last event."""

    type: Literal["ended"] = "ended"
    outcome: Literal["succeeded", "failed", "cancelled"]
    reason: str
    error: dict[str, Any] | None = None
    """``code`` and facts of the `ShareComputeError`; None unless the attempt failed."""


AttemptEvent: TypeAlias = Annotated[
    Planned
    | RangesPlaced
    | Reformed
    | Started
    | ComputationChosen
    | StepCommitted
    | Validated
    | Pictured
    | TargetReached
    | Sampled
    | Measured
    | LayersTimed
    | ReplanProposed
    | ReplanAbandoned
    | Offended
    | LinkCut
    | Protection
    | RoundMerged
    | TrafficMeasured
    | CheckpointSaved
    | ArtifactSaved
    | RowsDone
    | Note
    | AttemptEnded,
    Field(discriminator="type"),
]

attempt_events: TypeAdapter[list[AttemptEvent]] = TypeAdapter(list[AttemptEvent])
"""Adapter that reads and writes lists of events as JSON."""
