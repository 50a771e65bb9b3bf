"""Models of a plan: stages and their members, idle machines, predicted times and reasons."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

from pydantic import computed_field, model_validator

from share_compute.files.strict import StrictModel
from share_compute.models.profiles.places import Places
from share_compute.protocol.collectives import Algorithm
from share_compute.shards import Shard
from share_compute.specification.boundaries import (
    BoundaryCodec,
    FixedBoundaryCompressionSpec,
    fixed_boundaries,
)
from share_compute.specification.placement.pinned_plan import PinnedPlan

CauseKind = Literal["compute", "memory", "link", "latency", "synchronisation"]
"""Kind of a bottleneck: a machine's FLOP/s or memory bandwidth, a link's bandwidth or latency, or gradient sums."""


class Bottleneck(StrictModel):
    """The part of a step or a request that costs the most time."""

    kind: CauseKind
    where: str
    """Name of the machine, or names of the machines, that cause the bottleneck."""
    sentence: str
    """Explanation of the bottleneck, in one sentence."""


class Bounded(StrictModel):
    """A predicted time, with a lower bound for any plan on these machines."""

    lower_bound_s: float
    bottleneck: Bottleneck
    exact: bool
    """Whether the planner proved that no other plan it may choose has a shorter time by the cost model's formula."""
    links_assumed: bool = False
    """Whether no link was measured, so that communication times are assumptions."""

    @property
    @abstractmethod
    def bounded_s(self) -> float:
        """The predicted time in seconds to which `lower_bound_s` applies."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def gap(self) -> float | None:
        """Relative excess of the predicted time over the lower bound; None if the bound is 0."""
        # Rounding can make the predicted time slightly smaller than the bound.
        return max(0.0, self.bounded_s / self.lower_bound_s - 1) if self.lower_bound_s > 0 else None

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_computed(cls, data: Any) -> Any:
        """Drop the computed ``gap`` from serialised data, so that the data can be read back."""
        return {key: value for key, value in data.items() if key != "gap"} if isinstance(data, dict) else data


class Prediction(Bounded):
    """Predicted figures of a training plan."""

    step_s: float
    """Time of one optimizer step, by the event simulator of the schedule."""
    formula_s: float
    """Time of one optimizer step, by the formula that the search minimises."""
    samples_per_s: float
    tokens_per_s: float

    @property
    def bounded_s(self) -> float:
        """Predicted time of one optimizer step in seconds, to which `lower_bound_s` applies."""
        return self.step_s


PINNED = "pinned"
"""Strategy of a plan that a job pins with ``parallelism.plan``."""
NOT_MEASURED = "its speed was not measured, while that of others was"


class IdleMachine(StrictModel):
    """A contributor without work in the plan."""

    contributor_id: str
    name: str
    reason: str
    """Reason why the plan does not use the machine, in one sentence."""


class MemberPlan(StrictModel):
    """One contributor as a member of a stage."""

    contributor_id: str
    name: str
    microbatches: tuple[int, ...]
    """Ids of the microbatches that the member computes in each step."""
    memory_bytes: int
    """Predicted memory need, in bytes."""
    lent_bytes: int | None = None
    """Memory that the machine's owner lends, in bytes; None in plans of older releases."""
    busy_fraction: float | None = None
    """Predicted share of a step in which the member computes; None if it was not predicted.

    In serving plans, the share of a request (objective latency) or of the time between tokens (objective throughput).
    """
    reason: str
    """Reason why the member holds its layers, in one sentence."""
    standing: str = ""
    """Part of ``reason`` without the layers and the memory."""


class SumPlan(StrictModel):
    """Algorithm by which the members of a stage sum their gradients, and predictions for all algorithms."""

    algorithm: Algorithm
    """The algorithm that the members use: the one that the job names, or the fastest.

    Members with GPUs use NCCL's direct exchange, which is called sharded here, whatever the job names."""
    sites: tuple[int, ...]
    """Number of the site of each member. Members of one site have similar links."""
    seconds: dict[Algorithm, float | None]
    """Predicted time of one sum of all gradients, by algorithm; None if it would use a dead link."""
    received_bytes: int
    """Bytes that the member with the most traffic receives in a step, compressed."""
    crossing_bytes: int
    """Bytes that the site with the most traffic sends to other sites in a step, compressed; 0 with one site."""


class StagePlan(StrictModel):
    """One stage: a range of layers, and the members that each hold all of it."""

    start: int
    """First layer."""
    stop: int
    """One past the last layer."""
    parameters: int
    members: tuple[MemberPlan, ...]
    boundary_codec: BoundaryCodec = "none"
    """Codec of the activations and gradients that this stage and the next one exchange; none for the last stage."""
    boundary_bytes: int | None = None
    """Bytes of one microbatch's activation for the next stage, compressed; its gradient has as many.

    None for the last stage, in serving plans, and in plans of older releases."""
    sum_codec: str = "none"
    """Codec of the gradients that the members of this stage sum."""
    sums: SumPlan | None = None
    """How the members sum their gradients.

    None for stages with one member, in serving plans, and in plans of older releases."""


class BranchPlan(StrictModel):
    """The stages of one branch of a job whose branches merge in rounds."""

    number: int
    """Number of the branch, from 0."""
    stages: tuple[StagePlan, ...]
    step_s: float | None = None
    """Predicted time of one step of the branch; None if it is unknown."""


def layer_span(start: int, stop: int) -> str:
    """Return the layers [start, stop) as text, for example ``layers 0-3``."""
    return f"layer {start}" if stop == start + 1 else f"layers {start}-{stop - 1}"


class Plan(StrictModel):
    """The ordered stages of one job in one epoch, a period in which members and their layers stay the same."""

    epoch: int
    model_id: str = "model"
    """Name of the job or deployment."""
    strategy: str
    num_layers: int
    parameters: int
    """Number of parameters of the whole model; tied weights count once."""
    model_digest: str | None = None
    """Digest of the layers' types and numbers of parameters; None in serving plans and plans of older releases."""
    places: Places | None = None
    """Naming scheme of the model's weights; None in serving plans and plans of older releases."""
    stages: tuple[StagePlan, ...]
    microbatches: int
    """Number of microbatches that a batch is split into."""
    idle: tuple[IdleMachine, ...] = ()
    """Contributors without work, and the reasons."""
    prediction: Prediction | None = None
    """Predicted figures; None if they are unknown, and in serving plans."""
    branches: tuple[BranchPlan, ...] = ()
    """Stages of each branch; empty without rounds. ``stages`` and ``prediction`` are then those of the first branch."""

    @property
    def stage_sizes(self) -> list[int]:
        """Number of members of each stage."""
        return [len(stage.members) for stage in self.stages]

    @property
    def machines(self) -> frozenset[str]:
        """Ids of the contributors that hold layers."""
        stages = (*self.stages, *(stage for branch in self.branches for stage in branch.stages))
        return frozenset(member.contributor_id for stage in stages for member in stage.members)

    @property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """Number of microbatches of each member of each stage."""
        return tuple(tuple(len(member.microbatches) for member in stage.members) for stage in self.stages)

    @property
    def boundaries(self) -> FixedBoundaryCompressionSpec:
        """Codecs at the boundaries between the plan's stages."""
        return fixed_boundaries({stage.stop: stage.boundary_codec for stage in self.stages})

    def with_idle(self, left_out: tuple[IdleMachine, ...]) -> Plan:
        """Return the plan with ``left_out`` added to its idle machines."""
        return self.model_copy(update={"idle": (*self.idle, *left_out)})

    def carries_out(self, pinned: PinnedPlan | None) -> bool:
        """Return whether the plan has the stages and machines of a pinned plan; False if nothing is pinned."""
        if pinned is None:
            return False
        wanted = [
            (stage.first_layer, stage.last_layer + 1, sorted(member.name for member in stage.machines))
            for stage in pinned.stages
        ]
        found = [
            (stage.start, stage.stop, sorted(member.name for member in stage.members))
            for stage in self.stages
        ]
        return wanted == found

    def shard(self, stage: int) -> Shard:
        """Return the shard of the stage with index ``stage``."""
        return Shard(self.model_id, self.stages[stage].start, self.stages[stage].stop, self.num_layers)
