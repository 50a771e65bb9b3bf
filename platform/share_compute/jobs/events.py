"""What an attempt at a job tells the control plane: declared, versioned messages, in order."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from share_compute.planning.plan import Plan
from share_compute.planning.timings import MachineTimings
from share_compute.protocol.failures import Failure
from share_compute.specification import TrainJob
from share_compute.strict import StrictModel
from share_compute.topology import Topology


class Assignment(StrictModel):
    """All that a coordinator needs to make one attempt at a job."""

    job_id: str
    attempt: int
    spec: TrainJob
    topology: Topology
    """The contributors that this attempt may use."""
    epoch: int = 0
    folder: Path
    """The job's own folder on the server: prepared data, checkpoints, artifacts."""
    checkpoint: Path | None = None
    """Folder of the checkpoint to continue from."""
    told: int = 0
    """Last step that the control plane knows to be committed; of later ones that are it is told again."""
    drift: float = Field(default=0.25, gt=0)
    """Share by which the measured step may differ from the predicted one before the job is planned again."""
    checkpoint_every_s: float | None = Field(default=None, gt=0)
    """The cluster's time from one checkpoint to the next; see `timed_checkpoints_s`."""
    timings: dict[str, MachineTimings] = Field(default_factory=dict)
    """What earlier attempts timed, by contributor id."""
    failures: tuple[Failure, ...] = ()
    """What goes wrong, at named points of the protocol; only tests have some."""

    @property
    def timed_checkpoints_s(self) -> float | None:
        """Time from one checkpoint to the next; None where the job names an interval in steps, or the cluster none."""
        return self.checkpoint_every_s if self.spec.training.checkpoint_every is None else None


class Offer(StrictModel):
    """Which machines a running attempt may use from now on, in place of those that it was told before.

    By a `ReplanProposed` it asks for those that it does not hold yet, and starts nothing there before that is answered.
    """

    topology: Topology
    """Those that it holds, and free ones that no other job is offered."""
    answers: int | None = None
    """Step of the `ReplanProposed` that is answered: of its machines, the attempt holds those in the topology."""


class Planned(StrictModel):
    """The plan is made; members are being started."""

    type: Literal["planned"] = "planned"
    plan: Plan


class Reformed(StrictModel):
    """Machines came or went, and training goes on: another epoch, with another plan."""

    type: Literal["reformed"] = "reformed"
    epoch: int
    step: int
    """The open step, with which the epoch begins."""
    plan: Plan
    """Who holds what from now on."""
    lost: tuple[str, ...] = ()
    """Ids of contributors that died or went silent."""
    joined: tuple[str, ...] = ()
    """Ids of contributors that hold a part from now on."""
    left: tuple[str, ...] = ()
    """Ids of contributors that handed over what they held."""
    expected: tuple[str, ...] = ()
    """Ids of contributors that are on their way in, for the plan that was proposed last: they stay with the job."""
    seconds: float = Field(ge=0)
    """How long no step was computed."""
    recomputed: int = Field(ge=0)
    """Microbatches of the open step that had to be computed again."""
    sentence: str
    """Who came or went, and why, for people; without the figures above."""


class Started(StrictModel):
    """All members hold their shards; the first step begins."""

    type: Literal["started"] = "started"
    first_step: int
    total_steps: int


class StepCommitted(StrictModel):
    """One optimizer update is done."""

    type: Literal["step"] = "step"
    step: int
    """Counted from 1."""
    loss: float
    learning_rate: float
    gradient_norm: float | None
    samples: int
    tokens: int
    """Tokens in the step (samples, for a classifier)."""
    seconds: float
    tokens_per_s: float
    """Over the last steps; smoothed."""


class Validated(StrictModel):
    """Loss on samples that are not trained on."""

    type: Literal["validated"] = "validated"
    split: Literal["validation", "test"]
    step: int
    loss: float
    accuracy: float | None = None
    """Share of right classes, for a classifier."""
    perplexity: float | None = None
    """exp(loss), for a language model."""


class Sampled(StrictModel):
    """What the model made of a prompt: always the likeliest token next."""

    type: Literal["sampled"] = "sampled"
    step: int
    """After which it was made."""
    prompt: str
    text: str
    """What follows the prompt."""


class PoolTiming(StrictModel):
    """One pool, on paper and in reality."""

    predicted_busy_s: float | None
    """Time that its busiest member computes in a step; None where the plan predicts nothing."""
    measured_busy_s: float


class Measured(StrictModel):
    """How long steps take, beside what the plan predicted."""

    type: Literal["measured"] = "measured"
    step: int
    """The last of those measured."""
    predicted_step_s: float | None
    """None where the plan predicts nothing, since no machine's speed was measured."""
    measured_step_s: float
    """Median of the last steps."""
    pools: tuple[PoolTiming, ...]
    """In pipeline order."""
    machines: dict[str, float] = Field(default_factory=dict)
    """Seconds that each computes in a step, by contributor id; empty in what older releases measured."""


class LayersTimed(StrictModel):
    """How long layers take on the machines that hold them; the job's next plans are made with it."""

    type: Literal["layers-timed"] = "layers-timed"
    step: int
    """The last of those timed."""
    machines: dict[str, MachineTimings]
    """By contributor id; only what is new."""


class ReplanProposed(StrictModel):
    """Another plan pays for moving to it; it is carried out as soon as its machines are there."""

    type: Literal["replan-proposed"] = "replan-proposed"
    step: int
    """After which it was worked out."""
    plan: Plan
    """The better one."""
    current_step_s: float
    """Of the plan in use, predicted from measured times."""
    gain_s: float
    """Over the steps that are left."""
    move_cost_s: float
    """Time to carry state to where it will be, and to link members anew."""
    sentence: str


class ReplanAbandoned(StrictModel):
    """The plan that was proposed last is not carried out; nothing of the job is left on machines that it added."""

    type: Literal["replan-abandoned"] = "replan-abandoned"
    reason: str


class Offended(StrictModel):
    """A machine made wrong numbers; they were not used."""

    type: Literal["offended"] = "offended"
    machine: str
    """Id of the contributor."""
    step: int
    what: str
    """What was wrong, for people."""
    quarantined: bool
    """Whether the job does without the machine from now on."""
    accuser: str | None = None
    """Id of the contributor on whose word alone this rests; None where the coordinator knows it."""
    sentence: str


class LinkCut(StrictModel):
    """Two machines of the job do not reach each other any more."""

    type: Literal["link-cut"] = "link-cut"
    machines: tuple[str, str]
    """Ids of the contributors."""
    sentence: str


class Protection(StrictModel):
    """Whether the job can lose any one of its machines without losing a step; false again with each epoch."""

    type: Literal["protection"] = "protection"
    step: int
    """The last committed one."""
    is_protected: bool
    """Whether each layer is on two machines, whole copies included."""


class CheckpointSaved(StrictModel):
    """A checkpoint that the job can be resumed from is on disk."""

    type: Literal["checkpoint"] = "checkpoint"
    step: int
    path: Path
    size_bytes: int


class ArtifactSaved(StrictModel):
    """A finished result is on disk."""

    type: Literal["artifact"] = "artifact"
    name: str
    path: Path
    size_bytes: int


class RowsDone(StrictModel):
    """Rows of a batch are answered and kept, whatever happens."""

    type: Literal["rows"] = "rows"
    done: int = Field(ge=0)
    """In all attempts."""
    total: int = Field(ge=0)
    failed: int = Field(ge=0)
    """Of those done: have an error in place of an answer."""
    rows_per_s: float | None = None
    """Over the last ones; None before there are some in this attempt."""
    tokens_per_s: float | None = None
    """Generated, or read where vectors are made; over the last rows."""


class Note(StrictModel):
    """A line for the job's log."""

    type: Literal["note"] = "note"
    level: Literal["info", "warning", "error"] = "info"
    message: str


class AttemptEnded(StrictModel):
    """Always the last event of an attempt."""

    type: Literal["ended"] = "ended"
    outcome: Literal["succeeded", "failed", "cancelled"]
    reason: str
    error: dict[str, Any] | None = None
    """``code`` and the facts of the `ShareComputeError`, when it failed."""


AttemptEvent: TypeAlias = Annotated[
    Planned
    | Reformed
    | Started
    | StepCommitted
    | Validated
    | Sampled
    | Measured
    | LayersTimed
    | ReplanProposed
    | ReplanAbandoned
    | Offended
    | LinkCut
    | Protection
    | CheckpointSaved
    | ArtifactSaved
    | RowsDone
    | Note
    | AttemptEnded,
    Field(discriminator="type"),
]

attempt_events: TypeAdapter[list[AttemptEvent]] = TypeAdapter(list[AttemptEvent])
"""Reads and writes lists of events as JSON."""
