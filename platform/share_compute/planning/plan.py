"""A plan: the ordered pools of one job at one epoch, with predicted time and reasons; and `make_plan`."""

from __future__ import annotations

from abc import abstractmethod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from pydantic import computed_field, model_validator

from share_compute.planning.partitioning import Shard
from share_compute.specification import TrainJob
from share_compute.strict import StrictModel
from share_compute.topology import Topology

if TYPE_CHECKING:
    from share_compute.planning.profile import ModelProfile
    from share_compute.planning.timings import Timings


CauseKind = Literal["compute", "memory", "link", "latency", "synchronisation"]
"""Arithmetic or memory bandwidth of a machine, bandwidth or latency of a link, the sum of a pool's gradients."""


class Bottleneck(StrictModel):
    """What a step, or a request, would have to be rid of to be faster."""

    kind: CauseKind
    where: str
    """Name of the machine, or of both ends of the link."""
    sentence: str
    """The same for people."""


class Bounded(StrictModel):
    """A predicted time, with one that no plan for these machines is below."""

    lower_bound_s: float
    bottleneck: Bottleneck
    exact: bool
    """Whether the search proved that no other plan has a smaller formula."""
    links_assumed: bool = False
    """Whether no link was measured, so that communication is an assumption."""

    @property
    @abstractmethod
    def bounded_s(self) -> float:
        """The time that the bound is about."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def gap(self) -> float | None:
        """How far the prediction is above the bound, as a share of it; None for a bound of 0."""
        # Both are sums of the same times in another order: rounding must not put a plan below its bound.
        return max(0.0, self.bounded_s / self.lower_bound_s - 1) if self.lower_bound_s > 0 else None

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_computed(cls, data: Any) -> Any:
        """Let what was written be read: the gap is worked out anew."""
        return {key: value for key, value in data.items() if key != "gap"} if isinstance(data, dict) else data


class Prediction(Bounded):
    """What the cost model says of a plan."""

    step_s: float
    """Of one optimizer step, by the event simulator of the schedule."""
    formula_s: float
    """The same by the formula that the search minimises."""
    samples_per_s: float
    tokens_per_s: float

    @property
    def bounded_s(self) -> float:
        """The time of a step."""
        return self.step_s


NOT_MEASURED = "its speed was not measured, while that of others was"
"""Why a machine is left out of which nothing can be predicted."""


class IdleMachine(StrictModel):
    """A contributor that the plan gives nothing."""

    contributor_id: str
    name: str
    reason: str
    """Why, in one sentence."""


class MemberPlan(StrictModel):
    """One contributor in a pool."""

    contributor_id: str
    name: str
    microbatches: tuple[int, ...]
    """Ids of the microbatches it computes in each step."""
    memory_bytes: int
    """Predicted need: weights, gradients, optimizer state and activations in flight."""
    lent_bytes: int | None = None
    """What its owner lends; None in plans of older releases."""
    busy_fraction: float | None = None
    """Share of a step in which it computes, predicted."""
    reason: str
    """Why it holds what it holds, in one sentence."""
    standing: str = ""
    """The part of the reason that the fields above do not say: why this machine, and with whom it shares."""


class PoolPlan(StrictModel):
    """One shard and the members that each hold all of it."""

    start: int
    """First layer."""
    stop: int
    """One past the last layer."""
    parameters: int
    members: tuple[MemberPlan, ...]


def layer_span(start: int, stop: int) -> str:
    """Return what people read for the layers [start, stop): ``layers 0-3``, counted from 0 as in the model's code."""
    return f"layer {start}" if stop == start + 1 else f"layers {start}-{stop - 1}"


class Plan(StrictModel):
    """The ordered pools of one job, at one epoch."""

    epoch: int
    model_id: str = "model"
    """Name of the model that is cut: the job's."""
    strategy: str
    num_layers: int
    parameters: int
    """Of the whole model; tied weights count once."""
    pools: tuple[PoolPlan, ...]
    microbatches: int
    """Pieces that a batch is cut into."""
    idle: tuple[IdleMachine, ...] = ()
    """Contributors that got nothing, and why."""
    prediction: Prediction | None = None
    """None where a machine's speed was not measured."""

    @property
    def pool_sizes(self) -> list[int]:
        """Members of each pool."""
        return [len(pool.members) for pool in self.pools]

    @property
    def machines(self) -> frozenset[str]:
        """Ids of the contributors that hold a part."""
        return frozenset(member.contributor_id for pool in self.pools for member in pool.members)

    @property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """Microbatches of each member of each pool."""
        return tuple(tuple(len(member.microbatches) for member in pool.members) for pool in self.pools)

    def shard(self, pool: int) -> Shard:
        """Return the shard of one pool."""
        return Shard(self.model_id, self.pools[pool].start, self.pools[pool].stop, self.num_layers)


def make_plan(
    spec: TrainJob,
    topology: Topology,
    profile: ModelProfile,
    epoch: int = 0,
    *,
    timings: Timings = MappingProxyType({}),
) -> Plan:
    """Lay a job over the machines by the strategy that it names.

    Machines whose speed was not measured are left out, unless that is so for all: then all count as alike, and the
    plan predicts nothing.

    Args:
        spec: the job; where it leaves the number of microbatches open, the plan settles it.
        topology: the machines that it may use, and the links between them.
        profile: what its model costs.
        epoch: copied into the plan.
        timings: measured times of layers, which replace estimates.

    Raises:
        PlanInfeasible: too few machines, layers or microbatches, or too little memory; ``details`` says how
            much is missing, and what would make the job fit.
        UserError: the model has nothing to train, or there is no such strategy.
    """
    # Imported here, so that those who only read plans need no numpy.
    from share_compute.planning.planner import solve  # noqa: PLC0415

    return solve(spec, topology, profile, epoch, timings).plan
